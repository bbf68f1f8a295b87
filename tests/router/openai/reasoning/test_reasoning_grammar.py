"""Grammars that wait for the end of the reasoning, as llguidance enforces them."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from router.common.errors import ApiError
from router.openai.bodies.grammar_source import schema_source
from router.openai.bodies.output_formats import ANY_OBJECT
from router.openai.reasoning.reasoning_grammar import ReasoningGrammar
from router.openai.reasoning.reasoning_syntax import MISTRAL, QWEN3, ReasoningStart, ReasoningSyntax
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from tests.router.openai.chat.toy import byte_level
from tests.router.openai.chat.weather import VOCABS, Vocab

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
BODIES = {
    "schema": schema_source(SCHEMA, "f").grammar,
    "regex": LLMatcher.grammar_from_regex(r'\{"a":[0-9]+\}'),
    "lark": LLMatcher.grammar_from_lark('start: "{\\"a\\":" INT "}"\nINT: /[0-9]+/'),
}


def grammar(vocab: str, syntax: ReasoningSyntax = QWEN3) -> ReasoningGrammar:
    return ReasoningGrammar(syntax, AddedTokenVocabulary.of(VOCABS[vocab].tokenizer))


@pytest.mark.parametrize("vocab", ["tokens", "letters"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("start", "text", "fits"),
    [
        ("open", 'hm\n</think>\n\n{"a":1}', True),
        ("open", '</think>{"a":1}', True),
        ("open", '{"a":1}</think>{"a":2}', True),
        ("open", '{"a":1}', False),
        ("open", "hm</think>hm", False),
        ("open", 'hm</think>\n\n\n{"a":1}', False),
        ("waiting", '{"a":1}', True),
        ("waiting", '<think>hm</think>\n{"a":1}', True),
        ("waiting", 'hm</think>\n{"a":1}', False),
        ("closed", '{"a":1}', True),
        ("closed", 'hm</think>{"a":1}', False),
    ],
)
def test_a_grammar_constrains_what_follows(
    vocab: str, body: str, start: ReasoningStart, text: str, fits: bool
) -> None:
    whole = grammar(vocab).after_reasoning(BODIES[body], start, None)
    assert VOCABS[vocab].fits(whole, text) == fits


def consumed(vocab: Vocab, grammar: str, text: str) -> int:
    matcher = LLMatcher(vocab.matching, grammar, log_level=0)
    ids: list[int] = vocab.tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids)


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_forces_the_end(budget: int) -> None:
    vocab, reasoning = VOCABS["tokens"], grammar("tokens")
    end = vocab.tokenizer.token_to_id("</think>")
    for body in (BODIES["schema"], reasoning.free_text):
        whole = reasoning.after_reasoning(body, "open", budget)
        assert consumed(vocab, whole, "q w x y z") == budget
        matcher = LLMatcher(vocab.matching, whole, log_level=0)
        assert matcher.consume_tokens(vocab.tokenizer.encode("q w x y z").ids[:budget])
        allowed = [i for i, bit in enumerate(matcher.compute_logit_bias()) if bit]
        assert allowed == [end]
    assert vocab.fits(reasoning.after_reasoning(reasoning.free_text, "open", 3), "a</think>b<|im")


def test_the_text_cannot_end_within_the_reasoning() -> None:
    vocab = VOCABS["tokens"]
    whole = grammar("tokens").after_reasoning(BODIES["schema"], "open", None)
    matcher = LLMatcher(vocab.matching, whole, log_level=0)
    assert matcher.consume_tokens(vocab.tokenizer.encode("hm").ids)
    assert vocab.eos is not None and not matcher.compute_logit_bias()[vocab.eos]


def test_free_text_after_the_reasoning_has_no_markers() -> None:
    vocab, reasoning = VOCABS["tokens"], grammar("tokens")
    whole = reasoning.after_reasoning(reasoning.free_text, "waiting", 9)
    assert vocab.fits(whole, "yes <tool_call> no")
    assert vocab.fits(whole, "<think>a</think>yes <tool_call>")
    for text in ("yes <think>", "<think>a</think>yes</think>", "<think>a<think>b</think>yes"):
        assert not vocab.fits(whole, text)


def test_a_budget_needs_an_end_marker_that_is_a_token() -> None:
    with pytest.raises(ApiError, match="not one token") as error:
        grammar("letters").after_reasoning(BODIES["schema"], "open", 5)
    assert error.value.param == "thinking_token_budget"


def test_special_tokens_are_markers_as_well() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("[THINK]"), AddedToken("[/THINK]")])
    vocab = Vocab(tokenizer)
    reasoning = ReasoningGrammar(MISTRAL, AddedTokenVocabulary.of(tokenizer))
    whole = reasoning.after_reasoning(schema_source(ANY_OBJECT, "f").grammar, "waiting", 4)
    assert vocab.fits(whole, "[THINK]q w[/THINK]{}")
    assert vocab.fits(whole, "{}")
    assert not vocab.fits(whole, "[THINK]{}")
