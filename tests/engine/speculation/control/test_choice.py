"""How much to propose, as a pure function: against all there is, and the paper's formulas."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.performance.draft_choice import (
    BatchCosts,
    Vector,
    choose_draft_lengths,
    expected_tokens,
)


def value(counts: tuple[int, ...], gains: Vector, costs: BatchCosts) -> float:
    """Tokens per second of proposing exactly these."""
    nodes = sum(counts)
    tokens = len(counts) + sum(gains[i, :n].sum() for i, n in enumerate(counts))
    seconds = costs.verify[nodes] if costs.padded is None else costs.padded[max(counts)]
    seconds = seconds + costs.per_node * nodes
    return float(tokens / (seconds + costs.per_pass * costs.passes[max(counts)]))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Vector, BatchCosts]:
    """A few sequences with gains that fall, on any curve that does not."""
    batch, most = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    share = st.floats(0.01, 1.0)
    drawn = [sorted((draw(share) for _ in range(most)), reverse=True) for _ in range(batch)]
    rises = [draw(st.sampled_from([0.0, 0.0, 0.1, 1.0, 5.0])) for _ in range(batch * most)]
    verify: Vector = 1.0 + np.cumsum(np.array([0.0, *rises]))
    chain = np.arange(most + 1)
    passes = draw(st.sampled_from([chain, np.minimum(chain, 1), (chain + 1) // 2]))
    per_pass, per_node = draw(st.floats(0, 1)), draw(st.floats(0, 0.2))
    padded = None
    if draw(st.booleans()):
        more = [draw(st.sampled_from([0.0, 0.1, 3.0])) for _ in range(most)]
        padded = 1.0 + np.cumsum(np.array([0.0, *more]))
    return np.array(drawn), BatchCosts(1.0, verify, passes, per_pass, per_node, padded=padded)


@given(problems())
def test_chosen_lengths_are_optimal(problem: tuple[Vector, BatchCosts]) -> None:
    gains, costs = problem
    batch, most = gains.shape
    found = choose_draft_lengths(gains, np.ones_like(gains), costs)
    every = itertools.product(range(most + 1), repeat=batch)
    best = max(value(counts, gains, costs) for counts in every if any(counts))
    chosen = value(tuple(found.counts), gains, costs)
    assert chosen == pytest.approx(best)
    assert found.speedup == pytest.approx(chosen * costs.plain / batch)


def test_no_drafts_without_gain() -> None:
    gains = np.zeros((4, 8))
    costs = BatchCosts(1.0, np.ones(33), np.arange(9))
    assert choose_draft_lengths(gains, np.ones_like(gains), costs).counts == [0, 0, 0, 0]
    assert choose_draft_lengths(gains, np.ones_like(gains), costs).speedup == 1.0


def test_highest_gains_get_nodes_first() -> None:
    gains: Vector = np.array([0.95, 0.1, 0.6])[:, None] ** np.arange(1.0, 9.0)
    verify: Vector = 1.0 + 0.05 * np.arange(25.0)  # rows cost, so not all sequences get all nodes
    counts = choose_draft_lengths(
        gains, np.ones_like(gains), BatchCosts(1.0, verify, np.zeros(9, int))
    ).counts
    assert counts[0] > counts[2] > counts[1]


def test_rarely_proposed_rows_cost_little() -> None:
    """Prompt lookup: half of the time nothing is found, and nothing is verified."""
    verify = np.array([1.0, 1.5, 2.0])
    costs = BatchCosts(1.0, verify, np.zeros(3, int))
    surely = choose_draft_lengths(np.array([[0.4, 0.2]]), np.array([[1.0, 1.0]]), costs)
    seldom = choose_draft_lengths(np.array([[0.4, 0.2]]), np.array([[0.5, 0.5]]), costs)
    assert surely.speedup < 1.0 < seldom.speedup


def test_recorded_steps_have_as_many_nodes_for_each_sequence() -> None:
    """64 sequences with room for three nodes each are recorded; with room for four they are not."""
    padded = np.array([1.8, 2.0, 2.3, 2.3, 9.0, 9.0, 9.0, 9.0, 9.0])
    verify = 1.8 + 0.005 * np.arange(513.0)
    costs = BatchCosts(1.8, verify, np.minimum(np.arange(9), 1), most=256)
    gains = np.ones((64, 8))
    alike = choose_draft_lengths(gains, gains, costs)
    assert alike.counts == [8] * 32 + [0] * 32
    found = choose_draft_lengths(gains, gains, replace(costs, padded=padded))
    assert found.counts == [3] * 64
    assert found.speedup == pytest.approx(4 * 1.8 / 2.3)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3])
def test_one_sequence_gets_the_length_of_the_paper(acceptance: float, cost: float) -> None:
    gains = acceptance ** np.arange(1.0, 17.0)[None, :]
    costs = BatchCosts(1.0, np.ones(17), np.arange(17), per_pass=cost)
    found = choose_draft_lengths(gains, np.ones_like(gains), costs)
    values = [expected_tokens(acceptance, n) / (1 + cost * n) for n in range(1, 17)]  # theorem 3.8
    assert found.counts == [1 + values.index(max(values))]
    assert found.speedup == pytest.approx(max(values))
    assert found.tokens == pytest.approx(expected_tokens(acceptance, found.counts[0]))


def test_figures_of_the_formula() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == 1.0
    assert expected_tokens(0.8, 5) == pytest.approx(3.68928)  # table 1 of the paper: 3.69
