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

from engine.structured_output.masks import MaskFiller, bitmask_words, forbidden_mask, unpack_bits
from engine.structured_output.matcher import GrammarMatcher
from tests.engine.grammars import CPU, Constrained, allowed, regex, save_tokenizer, schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def constrained(folder: Path) -> Constrained:
    return Constrained(folder, 320, (2,))


def test_tokens_beyond_the_tokenizer_are_never_allowed(constrained: Constrained) -> None:
    """Nor are special tokens: the model has 320 tokens, the tokenizer 266."""
    ids = allowed(constrained.matcher(regex("(?s:.+)")))
    assert ids and min(ids) > 2 and max(ids) < 266


def test_mask_is_cut_to_a_model_with_fewer_tokens_than_its_tokenizer(folder: Path) -> None:
    few = Constrained(folder, 300, (2,)).matcher(regex("a"))
    assert allowed(few, 300) == allowed(Constrained(folder, 320, (2,)).matcher(regex("a")))
    cut = Constrained(folder, 200, (2,)).matcher(regex("a"))
    assert cut.vocab == 266 and forbidden_mask(MaskFiller(1).fill([cut]), 200, CPU).shape == (
        1,
        200,
    )


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), st.integers(97, 128))
def test_bits_unpack_the_same_on_every_device(words: list[int], vocab: int) -> None:
    bits = np.array([words], dtype=np.uint32).view(np.int32)
    expected = [not words[t // 32] >> t % 32 & 1 for t in range(vocab)]
    assert forbidden_mask(bits, vocab, CPU)[0].tolist() == expected
    assert unpack_bits(torch.from_numpy(~bits), vocab)[0].tolist() == expected


DRAFTED = schema({"enum": ["abc", "abd", "ab"]})


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "draft", ["", '"', '"ab', '"abd"', '"abx"', "x", '"ab"ab'], ids=lambda text: text or "none"
)
def test_masks_after_drafts_equal_masks_of_single_steps(
    constrained: Constrained, after: int, draft: str
) -> None:
    tokens = [constrained.text.token_to_id(c) for c in draft]
    matcher = constrained.matcher(DRAFTED)
    assert matcher.accept(tokens[:after]) or after > len(tokens) or draft[0] == "x"
    drafts = tokens[after:]
    drafts = drafts[: matcher.count_matching(drafts)]
    other = constrained.matcher(regex("a+"))
    filling = MaskFiller(2).start([None, matcher, other], [[5], drafts, []], [0, 2, 20])
    assert filling is not None
    came = filling.wait(320, CPU)
    assert came.at == [*range(2, 3 + len(drafts)), 20]
    walker = matcher.copy()
    rows = [forbidden_mask(MaskFiller(1).fill([walker]), 320, CPU)[0]]
    for token in drafts:
        assert walker.accept((token,))
        rows.append(forbidden_mask(MaskFiller(1).fill([walker]), 320, CPU)[0])
    assert torch.equal(came.tokens, torch.stack([*rows, bars(other)]))
    assert allowed(matcher) == (~rows[0]).nonzero()[:, 0].tolist(), "it stays where it was"


def test_masks_are_copied_with_the_mask_of_each_row(constrained: Constrained) -> None:
    matchers = [constrained.matcher(DRAFTED), None, constrained.matcher(regex("a+"))]
    filling = MaskFiller(1).start(matchers)
    assert filling is not None
    bits = torch.full((4, bitmask_words(320)), 7, dtype=torch.int32)
    rows = torch.full((5,), 9, dtype=torch.int32)
    filling.copy_to(bits, rows)
    assert rows.tolist() == [0, -1, 1, -1, -1]
    wanted = torch.stack([bars(matcher) for matcher in matchers if matcher is not None])
    assert torch.equal(~unpack_bits(bits[:2], 320), wanted) and (bits[2:] == 7).all()


def bars(matcher: GrammarMatcher) -> torch.Tensor:
    return forbidden_mask(MaskFiller(1).fill([matcher]), 320, CPU)[0]


@pytest.mark.parametrize("strange", [266, 320, -1, 2**31, 2**63])
def test_unknown_draft_token_does_not_match_and_causes_no_problem(
    constrained: Constrained, strange: int
) -> None:
    matcher = constrained.matcher(regex("ab+"))
    tokens = [constrained.text.token_to_id(c) for c in "abb"]
    assert matcher.count_matching([*tokens, strange, tokens[1]]) == 3
    assert matcher.count_matching([strange]) == 0
    assert not matcher.problem and matcher.accept(tokens)


def test_nothing_matches_after_the_end(constrained: Constrained) -> None:
    matcher = constrained.matcher(regex("a"))
    a = constrained.text.token_to_id("a")
    assert matcher.count_matching([a, 2, 2, a]) == 2
    assert forbidden_mask(MaskFiller(1).fill([matcher], [[a, 2]]), 320, CPU)[2].all()
    assert matcher.advance(a) and matcher.advance(2) and matcher.count_matching([2]) == 0


def test_nothing_matches_after_a_problem(constrained: Constrained) -> None:
    wrong = GrammarMatcher.compile(constrained.inner, "nonsense {")
    assert wrong.problem and wrong.count_matching([5, 6]) == 0


def limited(constrained: Constrained) -> GrammarMatcher:
    """Too complex after some "x", and simple after "q"."""
    grammar = LLMatcher.grammar_from_lark(
        'start: "q" "r" | "x" a\na: "x" a | "y" a | b "c" |\nb: a a "z"'
    )
    limits = LLParserLimits(step_max_items=28, verbose_errors=False)
    inner = LLMatcher(constrained.inner, grammar, log_level=0, limits=limits)
    return GrammarMatcher(inner, constrained.inner.vocab_size)


def test_drafts_that_meet_a_limit_do_not_refuse_another_text(constrained: Constrained) -> None:
    x, q, r = (constrained.text.token_to_id(c) for c in "xqr")
    matcher, plain, masker = limited(constrained), limited(constrained), MaskFiller(1)
    assert matcher.count_matching([x] * 5) == 5
    rows = masker.fill([matcher], [[x] * 5])
    assert rows[1].any() and not matcher.problem
    for token in (q, r):
        assert matcher.count_matching([x, x]) == 0, "no more of them"
        assert np.array_equal(masker.fill([matcher]), masker.fill([plain]))
        assert matcher.advance(token) and plain.advance(token)
    assert matcher.stopped and not matcher.problem


def test_text_that_meets_the_limit_is_refused_as_without_drafts(
    constrained: Constrained,
) -> None:
    x = constrained.text.token_to_id("x")
    matcher, plain, masker = limited(constrained), limited(constrained), MaskFiller(1)
    assert matcher.count_matching([x] * 5) == 5
    rows = masker.fill([matcher], [[x] * 5])
    row = 0
    while not plain.problem:
        assert np.array_equal(masker.fill([plain])[0], rows[row])
        token = 2 if plain.problem else x
        assert matcher.advance(token) == plain.advance(token)
        row += 1
    assert row == 3 and "Too many items" in plain.problem
    assert matcher.problem == plain.problem


def test_bitmask_words_are_rounded_up() -> None:
    assert [bitmask_words(v) for v in (1, 32, 33, 320)] == [1, 1, 2, 10]


@pytest.mark.parametrize("make", [schema, lambda wanted: regex("[0-9]+")])
def test_a_copied_matcher_advances_independently(
    constrained: Constrained, make: Callable[[dict[str, str]], str]
) -> None:
    matcher = constrained.matcher(make({"type": "integer"}))
    copy = matcher.copy()
    one = constrained.text.token_to_id("1")
    assert copy.advance(one)
    assert allowed(matcher) != allowed(copy)
