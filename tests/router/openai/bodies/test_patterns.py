"""Patterns of strings: what a grammar lets through matches them; what matches gets through."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.openai.bodies.grammar_source import exclude_nul, schema_source, without_nul
from tests.router.openai.chat.toy import byte_level

TOKENIZER = byte_level()
MATCHING = LLTokenizer(TOKENIZER.to_str(), eos_token=TOKENIZER.token_to_id("</s>"))
PATTERNS = (
    '^[^"]*!$',
    r"^[^\\]*!$",
    r'^[^"\\]{0,3}!$',
    r"^(?:[^\x22x]|\\)*$",
    r'^[^\]"]+$',
    r"^[^\s,]*!$",
    r'^\[[^"]!',
    r'^[a"\[^]+!$',
)
VALUES = ("!", "a!", 'a"!', "\\!", "\n!", "[x!", '["!', "[^!", ", !", "é日!", "]!")


def accepted(schema: dict[str, Any], value: Any) -> bool:
    matcher = LLMatcher(MATCHING, schema_source(schema, "f").grammar)
    tokens = MATCHING.tokenize_str(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    return matcher.validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_strings_are_taken_that_match_and_no_others(pattern: str) -> None:
    wanted = [value for value in VALUES if re.search(pattern, value)]
    schema = {"type": "object", "properties": {"s": {"type": "string", "pattern": pattern}}}
    assert [value for value in VALUES if accepted(schema, {"s": value})] == wanted
    assert 0 < len(wanted) < len(VALUES)


def test_only_patterns_are_written_anew() -> None:
    inner = {"pattern": "[^a]"}
    schema = {
        "properties": {"pattern": inner, "const": inner, "n": {"const": inner, "enum": [inner]}},
        "patternProperties": {"^[^b]$": {"anyOf": [inner]}},
        "description": "[^a]",
    }
    new = {"pattern": r"[^\x00a]"}
    assert exclude_nul(schema) == {
        "properties": {"pattern": new, "const": new, "n": {"const": inner, "enum": [inner]}},
        "patternProperties": {r"^[^\x00b]$": {"anyOf": [new]}},
        "description": "[^a]",
    }


def test_a_class_is_negated_by_its_first_character_only() -> None:
    assert without_nul(r"\[^a[b^][\]^c][^d]") == r"\[^a[b^][\]^c][^\x00d]"


@pytest.mark.parametrize("pattern", ["[" * 100_000, "[" * 100_000 + "\\", "[^" * 50_000])
def test_classes_that_are_not_closed_take_no_time(pattern: str) -> None:
    start = time.thread_time()
    assert without_nul(pattern).replace(r"\x00", "") == pattern
    assert time.thread_time() - start < 1.0
