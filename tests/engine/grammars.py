"""Grammars for tests, a tokenizer of bytes for models without one, and engines that know both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.execution.engine import Engine
from engine.structured_output.compiler import load_grammar_tokenizer
from engine.structured_output.masks import MaskFiller, forbidden_mask
from engine.structured_output.matcher import GrammarMatcher
from protocol.requests import Request

MERGES = [('"', ":"), (",", '"'), ("t", "r"), ("u", "e"), ("tr", "ue"), ("}", "}"), ("1", "2")]
SPECIAL = [
    "<unk>",
    "<bos>",
    "<eos>",
]  # the end is token 2, as in tests/engine/families.py


def save_tokenizer(folder: Path, marks: Sequence[str] = ()) -> Path:
    """A byte-level ``tokenizer.json`` of 266 tokens; ``marks``: added tokens that are shown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *(a + b for a, b in MERGES)]
    model = models.BPE({word: i for i, word in enumerate(words)}, MERGES, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def schema(wanted: dict[str, Any]) -> str:
    """The grammar of JSON without spaces that fits a schema."""
    return LLMatcher.grammar_from_json_schema(wanted, overrides={"whitespace_flexible": False})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


class Constrained:
    """Starts requests on engines of one model folder, with their grammars."""

    def __init__(self, folder: Path, vocab: int, eos: Sequence[int]) -> None:
        self.text = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.inner = load_grammar_tokenizer(folder / "tokenizer.json", vocab, eos)

    def matcher(self, grammar: str) -> GrammarMatcher:
        return GrammarMatcher.compile(self.inner, grammar)

    def of(self, request: Request) -> GrammarMatcher | None:
        grammar = request.sampling.grammar
        return self.matcher(grammar) if grammar else None

    def generate(self, engine: Engine, handle: int, request: Request) -> None:
        engine.generate(handle, request, self.of(request))

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.text.decode(list(tokens))
        return text


CPU = torch.device("cpu")


def allowed(matcher: GrammarMatcher, vocab: int = 320) -> list[int]:
    """Tokens that may come next."""
    barred = forbidden_mask(MaskFiller(1).fill([matcher]), vocab, CPU)
    return (~barred)[0].nonzero()[:, 0].tolist()


_leaves = st.one_of(
    st.builds(lambda values: {"enum": values}, st.lists(st.text('ab\n"é', max_size=4), min_size=1)),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-500, 500),
        st.integers(0, 2000),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x"}]),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}(-[0-9])?$"}),
)


def _grow(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(
            lambda props, count: {
                "type": "object",
                "properties": props,
                "required": list(props)[:count],
                "additionalProperties": False,
            },
            properties,
            st.integers(0, 3),
        ),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(_leaves, _grow, max_leaves=6)
"""JSON schemas whose values are all short."""
