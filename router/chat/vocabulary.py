"""The added tokens of a tokenizer, as grammars see them.

llguidance takes an added token for a control token if the tokenizer says that it is special, or if
it looks like ``<...>``. No text matches a control token; a grammar names it by its id.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from tokenizers import Tokenizer

from router.chat.source import quoted


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
