"""``AddedTokenVocabulary``: the added tokens of a tokenizer, as grammars see them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from tokenizers import Tokenizer

from router.openai.bodies.grammar_source import lark_literal


class AddedTokenVocabulary(NamedTuple):
    """The added tokens of a tokenizer, as grammars see them.

    llguidance treats an added token as a control token if the tokenizer marks it as special or if
    it looks like ``<...>``. Text never matches a control token; a grammar names it by its id.
    """

    control: dict[str, int]  # control token -> id
    special: frozenset[str]  # those of them that a detokenizer skips

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AddedTokenVocabulary:
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(t.content for t in added.values() if t.special)
        control = {
            t.content: i for i, t in added.items() if t.special or re.fullmatch("<.*>", t.content)
        }
        return cls(control, special)

    def literal(self, text: str) -> str:
        """Return Lark for ``text``, with its control tokens by their ids; empty for no text."""
        if not self.control:
            return lark_literal(text) if text else ""
        longest = sorted(self.control, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest))})", text)
        return " ".join(
            f"<[{self.control[piece]}]>" if piece in self.control else lark_literal(piece)
            for piece in pieces
            if piece
        )

    def visible_ids(self, without: Collection[str]) -> list[int]:
        """Return the sorted ids of control tokens that a detokenizer keeps, such as ``<think>``."""
        return sorted(
            i for t, i in self.control.items() if t not in self.special and t not in without
        )
