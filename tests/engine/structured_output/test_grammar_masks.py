"""Masks of a step's rows, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from engine.structured_output.masks import Masker, forbidden, unpacked_on_device, words_for
from engine.structured_output.matcher import Matcher
from tests.engine.grammars import CPU, Constrained, allowed, regex, save_tokenizer, schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def constrained(folder: Path) -> Constrained:
    return Constrained(folder, 320, (2,))


def test_what_lies_beyond_the_tokenizer_is_never_allowed(constrained: Constrained) -> None:
    """Nor are special tokens: the model has 320 tokens, the tokenizer 266."""
    ids = allowed(constrained.matcher(regex("(?s:.+)")))
    assert ids and min(ids) > 2 and max(ids) < 266


def test_a_model_with_fewer_tokens_than_its_tokenizer(folder: Path) -> None:
    few = Constrained(folder, 300, (2,)).matcher(regex("a"))
    assert allowed(few, 300) == allowed(Constrained(folder, 320, (2,)).matcher(regex("a")))
    cut = Constrained(folder, 200, (2,)).matcher(regex("a"))
    assert cut.vocab == 266 and forbidden(Masker(1).fill([cut]), 200, CPU).shape == (1, 200)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), st.integers(97, 128))
def test_bits_are_the_same_on_every_device(words: list[int], vocab: int) -> None:
    bits = np.array([words], dtype=np.uint32).view(np.int32)
    expected = [not words[t // 32] >> t % 32 & 1 for t in range(vocab)]
    assert forbidden(bits, vocab, CPU)[0].tolist() == expected
    assert unpacked_on_device(torch.from_numpy(~bits), vocab)[0].tolist() == expected


DRAFTED = schema({"enum": ["abc", "abd", "ab"]})


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "draft", ["", '"', '"ab', '"abd"', '"abx"', "x", '"ab"ab'], ids=lambda text: text or "none"
)
def test_masks_after_drafts_are_those_of_one_token_after_the_other(
    constrained: Constrained, after: int, draft: str
) -> None:
    tokens = [constrained.text.token_to_id(c) for c in draft]
    matcher = constrained.matcher(DRAFTED)
    assert matcher.accept(tokens[:after]) or after > len(tokens) or draft[0] == "x"
    drafts = tokens[after:]
    drafts = drafts[: matcher.fitting(drafts)]
    other = constrained.matcher(regex("a+"))
    filling = Masker(2).start_verification([None, matcher, other], [[5], drafts, []], [0, 2, 20])
    assert filling is not None
    came = filling.barred(320, CPU)
    assert came.at == [*range(2, 3 + len(drafts)), 20]
    walker = matcher.copy()
    rows = [forbidden(Masker(1).fill([walker]), 320, CPU)[0]]
    for token in drafts:
        assert walker.accept((token,))
        rows.append(forbidden(Masker(1).fill([walker]), 320, CPU)[0])
    assert torch.equal(came.tokens, torch.stack([*rows, bars(other)]))
    assert allowed(matcher) == (~rows[0]).nonzero()[:, 0].tolist(), "it stays where it was"


def bars(matcher: Matcher) -> torch.Tensor:
    return forbidden(Masker(1).fill([matcher]), 320, CPU)[0]


@pytest.mark.parametrize("strange", [266, 320, -1, 2**31, 2**63])
def test_a_draft_of_no_token_does_not_fit_and_harms_nothing(
    constrained: Constrained, strange: int
) -> None:
    matcher = constrained.matcher(regex("ab+"))
    tokens = [constrained.text.token_to_id(c) for c in "abb"]
    assert matcher.fitting([*tokens, strange, tokens[1]]) == 3
    assert matcher.fitting([strange]) == 0
    assert not matcher.problem and matcher.accept(tokens)


def test_after_the_end_nothing_fits(constrained: Constrained) -> None:
    matcher = constrained.matcher(regex("a"))
    a = constrained.text.token_to_id("a")
    assert matcher.fitting([a, 2, 2, a]) == 2
    assert forbidden(Masker(1).fill([matcher], [[a, 2]]), 320, CPU)[2].all()
    assert matcher.advance(a) and matcher.advance(2) and matcher.fitting([2]) == 0


def test_a_matcher_with_a_problem_fits_nothing(constrained: Constrained) -> None:
    wrong = Matcher.compile(constrained.inner, "nonsense {")
    assert wrong.problem and wrong.fitting([5, 6]) == 0


def limited(constrained: Constrained) -> Matcher:
    """Too complex after some "x", and simple after "q"."""
    grammar = LLMatcher.grammar_from_lark(
        'start: "q" "r" | "x" a\na: "x" a | "y" a | b "c" |\nb: a a "z"'
    )
    limits = LLParserLimits(step_max_items=28, verbose_errors=False)
    inner = LLMatcher(constrained.inner, grammar, log_level=0, limits=limits)
    return Matcher(inner, constrained.inner.vocab_size)


def test_drafts_that_lead_to_a_limit_refuse_no_other_text(constrained: Constrained) -> None:
    x, q, r = (constrained.text.token_to_id(c) for c in "xqr")
    matcher, plain, masker = limited(constrained), limited(constrained), Masker(1)
    assert matcher.fitting([x] * 5) == 5
    rows = masker.fill([matcher], [[x] * 5])
    assert rows[1].any() and not matcher.problem
    for token in (q, r):
        assert matcher.fitting([x, x]) == 0, "no more of them"
        assert np.array_equal(masker.fill([matcher]), masker.fill([plain]))
        assert matcher.advance(token) and plain.advance(token)
    assert matcher.stopped and not matcher.problem


def test_a_text_that_goes_to_the_limit_is_refused_as_without_drafts(
    constrained: Constrained,
) -> None:
    x = constrained.text.token_to_id("x")
    matcher, plain, masker = limited(constrained), limited(constrained), Masker(1)
    assert matcher.fitting([x] * 5) == 5
    rows = masker.fill([matcher], [[x] * 5])
    row = 0
    while not plain.problem:
        assert np.array_equal(masker.fill([plain])[0], rows[row])
        token = 2 if plain.problem else x
        assert matcher.advance(token) == plain.advance(token)
        row += 1
    assert row == 3 and "Too many items" in plain.problem
    assert matcher.problem == plain.problem


def test_words_are_rounded_up() -> None:
    assert [words_for(v) for v in (1, 32, 33, 320)] == [1, 1, 2, 10]


@pytest.mark.parametrize("make", [schema, lambda wanted: regex("[0-9]+")])
def test_a_copy_goes_its_own_way(
    constrained: Constrained, make: Callable[[dict[str, str]], str]
) -> None:
    matcher = constrained.matcher(make({"type": "integer"}))
    copy = matcher.copy()
    one = constrained.text.token_to_id("1")
    assert copy.advance(one)
    assert allowed(matcher) != allowed(copy)
