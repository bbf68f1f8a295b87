"""Keeps clients from writing control tokens: only the chat template may write them.

A tokenizer turns the text ``<|im_end|>`` into the control token wherever it stands, so a client
could end its own message and begin one of another role. Therefore every such text from a client
gets a break after its first character before the template sees it: a character that occurs nowhere
else in the request. The rendered prompt is tokenized in the pieces between breaks, where no control
token of the client's is whole; the tokens still spell what the client wrote. A prompt without
control tokens has no break, and becomes exactly the tokens that transformers makes of it.

Limits: a template that joins two fields of a client directly could still make a control token of
halves, and one that decides by the length of a text sees the break.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

from router.common.errors import invalid

MAX_BREAKS = 4096
"""Most pieces of one prompt: each costs a call of the tokenizer."""

_BREAKS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xF0100))]
"""Candidates for the break: noncharacters, then private code points; the first unused one is
taken."""


class ControlTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        texts = {t.content for t in added if t.special and len(t.content) > 1}
        self._starts = _starts_pattern(texts) if texts else None
        self._tokenizer = tokenizer
        self._anchor = _anchor(tokenizer)

    def insert_breaks(self, value: Any) -> tuple[Any, str]:
        """Return JSON ``value`` with breaks in its strings and keys, and the break; empty if
        unused."""
        if self._starts is None or not any(map(self._starts.search, _strings(value))):
            return value, ""
        taken = "".join(_strings(value))
        mark = next((c for c in _BREAKS if c not in taken), None)
        if mark is None:
            raise invalid(
                "messages contain too many code points that are not characters", "messages"
            )
        return _insert_mark(value, self._starts, mark), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a rendered prompt, without added tokens. Raises ApiError
        (400)."""
        pieces = text.split(mark) if mark else [text]
        if len(pieces) > MAX_BREAKS:
            raise invalid(
                f"messages contain the text of more than {MAX_BREAKS} control tokens", "messages"
            )
        try:
            # Only the batch call releases the interpreter lock.
            batch = [pieces[0], *(self._anchor + piece for piece in pieces[1:])]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # a batch raises the second
            message = "messages must be text, but hold half of a surrogate pair"
            raise invalid(message, "messages") from None
        first, *rest = [encoding.ids for encoding in encodings]
        return [*first, *(i for ids in rest for i in self._without_anchor(ids))]

    def _without_anchor(self, ids: list[int]) -> list[int]:
        if not self._anchor:
            return ids
        front = self._tokenizer.encode(self._anchor, add_special_tokens=False).ids
        return ids[len(front) :] if ids[: len(front)] == front else ids


_Trie = dict[str, "_Trie"]


def _starts_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of each text; lookahead finds overlapping ones, too.

    Common beginnings are tried once: with hundreds of reserved tokens side by side, 64 KiB of
    ``<`` would take 0.2 s of the event loop.
    """
    trie: _Trie = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    starts = [f"{re.escape(first)}(?={_rest_pattern(rest)})" for first, rest in trie.items()]
    return re.compile("|".join(sorted(starts)))


def _rest_pattern(node: _Trie) -> str:
    if "" in node:  # a text ends here; longer ones begin in the same place
        return ""
    branches = []
    for character, following in sorted(node.items()):
        beginning = re.escape(character)
        while len(following) == 1 and "" not in following:
            [(character, following)] = following.items()
            beginning += re.escape(character)
        branches.append(beginning + _rest_pattern(following))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _anchor(tokenizer: Tokenizer) -> str:
    """Return a prefix for pieces from the middle of a text: some tokenizers (SentencePiece's) begin
    every text with a space, which only the first piece may get."""
    first = tokenizer.encode("a", add_special_tokens=False).tokens[:1]
    return "\n" if first and first[0][0] in "▁Ġ" else ""


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, keys included."""
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


def _insert_mark(value: Any, starts: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return starts.sub(lambda found: found[0] + mark, value)
    if isinstance(value, dict):
        return {
            _insert_mark(k, starts, mark): _insert_mark(v, starts, mark) for k, v in value.items()
        }
    if isinstance(value, list):
        return [_insert_mark(item, starts, mark) for item in value]
    return value
