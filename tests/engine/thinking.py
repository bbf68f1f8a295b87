"""Requests of a model that thinks: their grammars wait for the end of the reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
from tokenizers import Tokenizer

from protocol.requests import Request
from router.openai.reasoning.reasoning_grammar import ReasoningGrammar
from router.openai.reasoning.reasoning_syntax import QWEN3
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from tests.engine.conftest import request
from tests.engine.families import save
from tests.engine.grammars import Constrained, save_tokenizer, schema

EOS = 2
BUDGET = 12
WANTED = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def thinking_folder(folder: Path) -> Path:
    """A toy model whose tokenizer has the markers."""
    return save_tokenizer(save(folder), (QWEN3.begin, QWEN3.end))


def thinking_request(name: str, prompt: Sequence[int], folder: Path, seed: int) -> Request:
    """A request for JSON after at most ``BUDGET`` tokens of reasoning."""
    vocabulary = AddedTokenVocabulary.of(Tokenizer.from_file(str(folder / "tokenizer.json")))
    grammar = ReasoningGrammar(QWEN3, vocabulary).after_reasoning(schema(WANTED), "open", BUDGET)
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 200, "ignore_eos": False}
    return request(name, list(prompt), grammar=grammar, **sampling)


def assert_thought(constrained: Constrained, tokens: Sequence[int]) -> None:
    """Assert that the reasoning ends within its budget, and that JSON of the schema follows."""
    end = constrained.text.token_to_id(QWEN3.end)
    assert end is not None
    assert list(tokens).count(end) == 1
    at = list(tokens).index(end)
    assert at <= BUDGET
    assert tokens[-1] == EOS
    jsonschema.validate(json.loads(constrained.decode(tokens[at + 1 : -1])), WANTED)
