"""The pace of a batch with drafts, against the formulas of the literature."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest

from protocol.performance.draft_choice import BatchCosts, choose_draft_lengths, expected_tokens
from protocol.performance.speculation_profile import (
    SpeculationProfile,
    decode_pace,
    parse_speculation,
)
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


def test_drafts_are_rows_of_a_step() -> None:
    """Beyond the rows that were seen, drafts that were free are no longer."""
    profile = SpeculationProfile(accept=(0.8,) * 4, most_nodes=4096)
    seen = MODEL._replace(rows_seen=64.0)
    trusted = [decode_pace(model, profile, 16, 0) for model in (MODEL, seen)]
    assert trusted[0] == trusted[1], "80 rows"
    beyond = [decode_pace(model, profile, 90, 0) for model in (MODEL, seen)]
    assert beyond[0].tokens > 3 and beyond[1].tokens == 1.0
    assert beyond[1].seconds == MODEL.decode_s(90, 0), "90 rows without drafts are trusted"


def test_costs_of_a_sequence_and_of_verifying_are_paid_once() -> None:
    profile = SpeculationProfile(accept=(0.9, 0.9), per_sequence_s=1e-4, per_step_s=1e-3)
    found = decode_pace(MODEL, profile, 4, 0)
    assert found.seconds == pytest.approx(MODEL.decode_s(4, 0) + 1.4e-3)


def test_drafts_of_a_step_are_limited() -> None:
    profile = SpeculationProfile(accept=(0.9,) * 8, most_nodes=64)
    assert decode_pace(MODEL, profile, 32, 0).tokens == pytest.approx(expected_tokens(0.9, 2))
    one = decode_pace(MODEL, profile, 65, 0).tokens
    assert one == pytest.approx(1 + 0.9 * 64 / 65), "one sequence of 65 gets no draft"


def test_the_chosen_length_is_that_of_the_worker_s_own_choice() -> None:
    """``choose_draft_lengths`` has the same best number of tokens a second for equal sequences,
    where rows begin to cost between two drafts of each. Elsewhere it may fill the free rows with
    one more draft for some of them, which ``decode_pace`` does not look at."""
    random = Random(1)
    for _ in range(400):
        places, batch = random.randint(1, 8), random.choice((1, 4, 16, 64))
        profile = SpeculationProfile(
            accept=tuple(random.uniform(0.2, 1.0) for _ in range(places)),
            per_pass_s=random.choice((0.0, 1e-4, 1e-3)),
            per_node_s=random.choice((0.0, 1e-6)),
            per_sequence_s=random.choice((0.0, 1e-5)),
            per_step_s=random.choice((0.0, 1e-3)),
            row_s=random.choice((0.0, 1e-6, 1e-5, 1e-4)),
            free_rows=random.choice((0.0, 2.0 * batch, 4.0 * batch)),
            passes_per_node=random.choice((0.0, 1.0)),
            most_nodes=random.choice((batch * places, 24, 256)),
        )
        plain_s = MODEL.decode_s(batch, 500 * batch)
        rows = batch + np.arange(batch * places + 1)
        free, nodes = max(profile.free_rows, batch), np.arange(places + 1)
        passes = np.ceil(np.minimum(nodes, 1 + (nodes - 1) * profile.passes_per_node))
        costs = BatchCosts(
            plain=plain_s,
            verify=plain_s + profile.per_step_s + profile.row_s * np.maximum(0.0, rows - free),
            passes=passes.astype(np.int64),
            per_pass=profile.per_pass_s,
            per_node=profile.per_node_s,
            per_sequence=profile.per_sequence_s,
            most=profile.most_nodes,
        )
        gains = np.tile(np.multiply.accumulate(profile.accept), (batch, 1))
        best = choose_draft_lengths(gains, np.ones_like(gains), costs)
        found = decode_pace(MODEL, profile, batch, 500 * batch)
        assert plain_s / found.tpot_s == pytest.approx(max(1.0, best.speedup))


@pytest.mark.parametrize(
    "wrong",
    [
        {"accept": ()},
        {"accept": (0.5,) * 17},
        {"accept": (math.nan,)},
        {"accept": (1.1,)},
        {"per_pass_s": -1.0},
        {"row_s": math.inf},
        {"per_node_s": math.nan},
        {"passes_per_node": 2.0},
        {"most_nodes": 0},
    ],
)
def test_profiles_that_no_worker_can_have_count_as_none(wrong: dict[str, Any]) -> None:
    assert parse_speculation(SpeculationProfile(**{"accept": (0.5,), **wrong})) is None
    good = SpeculationProfile(accept=(0.5,))
    assert parse_speculation(good) is good and parse_speculation(None) is None
