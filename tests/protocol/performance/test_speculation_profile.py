"""The pace of a batch with drafts, against the formulas of the literature."""

from __future__ import annotations

import pytest

from protocol.performance.draft_choice import expected_tokens
from protocol.performance.speculation_profile import SpeculationProfile, decode_pace
from protocol.performance.step_model import StepModel

MODEL = StepModel(5e-3, 1e-5, 1e-8, 0.0, 0.0)


def test_a_batch_without_drafts_takes_a_plain_step() -> None:
    assert decode_pace(MODEL, None, 8, 1000) == (1.0, MODEL.decode_s(8, 1000))


def test_free_drafts_give_the_expected_tokens_of_a_chain() -> None:
    profile = SpeculationProfile(accept=(0.8,) * 4)
    assert decode_pace(MODEL, profile, 1, 0).tokens == pytest.approx(expected_tokens(0.8, 4))


def test_rows_that_cost_end_drafting_in_a_large_batch() -> None:
    profile = SpeculationProfile(accept=(0.6, 0.6, 0.6), row_s=1e-4)
    paces = [decode_pace(MODEL, profile, batch, 0) for batch in (1, 16, 64, 256)]
    tokens = [pace.tokens for pace in paces]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 2 and tokens[-1] == 1.0
    times = [pace.tpot_s for pace in paces]
    assert times == sorted(times)


def test_passes_of_the_proposer_are_paid_once_for_all_sequences() -> None:
    alone = SpeculationProfile(accept=(0.9, 0.9), per_pass_s=1e-3)
    heads = SpeculationProfile(accept=(0.9, 0.9), per_pass_s=1e-3, passes_per_node=0.0)
    plain_s = MODEL.decode_s(4, 0)
    assert decode_pace(MODEL, alone, 4, 0).seconds == pytest.approx(plain_s + 2e-3)
    assert decode_pace(MODEL, heads, 4, 0).seconds == pytest.approx(plain_s + 1e-3)


def test_drafts_of_a_step_are_limited() -> None:
    profile = SpeculationProfile(accept=(0.9,) * 8, most_nodes=64)
    assert decode_pace(MODEL, profile, 32, 0).tokens == pytest.approx(expected_tokens(0.9, 2))
    assert decode_pace(MODEL, profile, 65, 0).tokens == 1.0
