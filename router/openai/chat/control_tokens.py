"""Control tokens: the template writes them, a client does not.

A tokenizer turns the text ``<|im_end|>`` into the control token wherever it stands, so a client
could end its own message and begin one of another role. Therefore every such text in what a client
sent gets a break after its first character, before the template sees it: a character that is
nowhere else in the request. The rendered text is tokenized in the pieces between breaks, where no
control token of the client's is whole; the tokens still spell what the client wrote. Text without
control tokens has no break, and becomes exactly the tokens that transformers makes of it.

Limits: a template that joins two fields of a client with nothing in between could still make one of
halves, and one that decides by the length of a text sees the break.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from router.common.errors import invalid
from router.openai.bodies.grammar_source import quoted

MAX_BREAKS = 4096
"""In one prompt: each costs a call of the tokenizer."""

_BREAKS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xF0100))]
"""Code points that are no characters, then private ones: the first that is free is taken."""


class ControlTokens:
    """The tokens of a tokenizer that are marked as special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        texts = sorted({t.content for t in added if t.special and len(t.content) > 1})
        # Looking ahead finds those that overlap, too.
        ahead = "|".join(re.escape(text[0]) + f"(?={re.escape(text[1:])})" for text in texts)
        self._starts = re.compile(ahead) if texts else None
        self._tokenizer = tokenizer
        self._anchor = _anchor(tokenizer)

    def broken(self, value: Any) -> tuple[Any, str]:
        """``value`` (JSON) with breaks in its strings and keys, and the break: empty, if none."""
        if self._starts is None or not any(map(self._starts.search, _strings(value))):
            return value, ""
        taken = "".join(_strings(value))
        sign = next((c for c in _BREAKS if c not in taken), None)
        if sign is None:
            raise invalid("messages hold too many code points that are no characters", "messages")
        return _insert(value, self._starts, sign), sign

    def encode(self, text: str, sign: str) -> list[int]:
        """Token ids of a rendered prompt, nothing added. Raises ApiError (400)."""
        pieces = text.split(sign) if sign else [text]
        if len(pieces) > MAX_BREAKS:
            raise invalid(
                f"messages hold the text of more than {MAX_BREAKS} control tokens", "messages"
            )
        try:
            # Only the batch call lets go of the interpreter lock.
            batch = [pieces[0], *(self._anchor + piece for piece in pieces[1:])]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # the second is what a batch raises
            message = "messages must be text, but hold half of a surrogate pair"
            raise invalid(message, "messages") from None
        first, *rest = [encoding.ids for encoding in encodings]
        return [*first, *(i for ids in rest for i in self._without_anchor(ids))]

    def _without_anchor(self, ids: list[int]) -> list[int]:
        if not self._anchor:
            return ids
        front = self._tokenizer.encode(self._anchor, add_special_tokens=False).ids
        return ids[len(front) :] if ids[: len(front)] == front else ids


def _anchor(tokenizer: Tokenizer) -> str:
    """What is put before a piece from the middle of a text, so that none begins a text: some
    tokenizers (SentencePiece's) begin a text with a space."""
    first = tokenizer.encode("a", add_special_tokens=False).tokens[:1]
    return "\n" if first and first[0][0] in "▁Ġ" else ""


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        inner = value
    for item in inner:
        yield from _strings(item)


def _insert(value: Any, starts: re.Pattern[str], sign: str) -> Any:
    if isinstance(value, str):
        return starts.sub(lambda found: found[0] + sign, value)
    if isinstance(value, dict):
        return {_insert(k, starts, sign): _insert(v, starts, sign) for k, v in value.items()}
    if isinstance(value, list):
        return [_insert(item, starts, sign) for item in value]
    return value


# MERGED router.chat.vocabulary
# The added tokens of a tokenizer, as grammars see them.
#
# llguidance takes an added token for a control token if the tokenizer says that it is special, or
# if
# it looks like ``<...>``. No text matches a control token; a grammar names it by its id.


class AddedTokens(NamedTuple):
    control: dict[str, int]  # control tokens in the sense above
    special: frozenset[str]  # of these, the ones that a detokenizer leaves out

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AddedTokens:
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(t.content for t in added.values() if t.special)
        control = {
            t.content: i for i, t in added.items() if t.special or re.fullmatch("<.*>", t.content)
        }
        return cls(control, special)

    def literal(self, text: str) -> str:
        """Lark for ``text``, in which control tokens stand for themselves."""
        if not self.control:
            return quoted(text)
        longest = sorted(self.control, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest))})", text)
        return " ".join(
            f"<[{self.control[piece]}]>" if piece in self.control else quoted(piece)
            for piece in pieces
            if piece
        )

    def visible(self, without: Collection[str]) -> list[int]:
        """Control tokens that are text to a reader, as those around thoughts; in order."""
        return sorted(
            i for t, i in self.control.items() if t not in self.special and t not in without
        )
