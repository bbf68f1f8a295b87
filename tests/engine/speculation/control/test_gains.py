"""What is learned of acceptance: of classes, and of sequences in them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.speculation.control.acceptance import EXPONENTS, AcceptanceModel, SequenceAcceptance
from protocol.performance.draft_choice import Vector

ONE = int(np.flatnonzero(EXPONENTS == 1.0)[0])


def chain(draw: random.Random, acceptance: float, nodes: int, most: int) -> tuple[Vector, Vector]:
    """One draft: places that were reached, and those that were accepted."""
    asked, accepted = np.zeros(most), np.zeros(most)
    asked[:nodes] = 1.0
    for node in range(nodes):
        if draw.random() >= acceptance:
            break
        accepted[node] = 1.0
    return asked, accepted


def trained_model(acceptance: float, nodes: int, most: int, drafts: int = 1000) -> AcceptanceModel:
    draw, gains = random.Random(1), AcceptanceModel(most)
    for _ in range(drafts):
        asked, accepted = chain(draw, acceptance, nodes, most)
        gains.observe(asked, asked, accepted, 1)
    return gains


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.9])
def test_frequencies_of_chains(acceptance: float) -> None:
    learned = trained_model(acceptance, 6, 6).accept_rates[ONE]
    np.testing.assert_allclose(learned, acceptance ** np.arange(1, 7), atol=0.1)


@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_places_never_reached_follow_from_those_before(acceptance: float) -> None:
    learned = trained_model(acceptance, 2, 8).accept_rates[ONE]
    np.testing.assert_allclose(learned, acceptance ** np.arange(1, 9), atol=0.15)
    assert (np.diff(learned) <= 0).all()


def test_nodes_never_proposed_have_low_proposal_rates() -> None:
    gains, draw = AcceptanceModel(4), random.Random(2)
    for _ in range(500):
        found = np.full(4, float(draw.random() < 0.3))
        gains.observe(np.ones(4), found, found * [1, 1, 0, 0], 1)
    assert gains.propose_rates[ONE] == pytest.approx(0.3, abs=0.08)
    assert gains.accept_rates[ONE][:2] == pytest.approx(0.3, abs=0.08)
    assert gains.accept_rates[ONE][2:].max() < 0.02


def test_old_drafts_decay() -> None:
    gains = trained_model(0.0, 2, 4)
    before = gains.drafts
    gains.observe(np.array([1.0, 1.0, 0, 0]), np.ones(4), np.array([1.0, 1.0, 0, 0]), 2048)
    assert before > 100 and gains.drafts < 5
    assert gains.accept_rates[ONE][0] > 0.2


@pytest.mark.parametrize("own", [0.05, 0.5, 0.97])
def test_a_sequence_differs_from_its_class(own: float) -> None:
    gains, sequences, draw = trained_model(0.5, 4, 8), SequenceAcceptance(8), random.Random(3)
    slots = sequences.assign_slots([7])
    assert gains.accept_rates[sequences.exponents(slots, gains, 0)][0][0] == pytest.approx(
        0.5, abs=0.1
    )
    learned = []
    for step in range(200):
        asked, accepted = chain(draw, own, 4, 8)
        sequences.observe(slots, asked[None], np.array([accepted.sum()]), step)
        learned.append(gains.accept_rates[sequences.exponents(slots, gains, step)][0][0])
    assert np.mean(learned[20:]) == pytest.approx(own, abs=0.12)


def test_sequence_without_drafts_returns_to_its_class() -> None:
    gains, sequences = trained_model(0.5, 4, 8), SequenceAcceptance(8)
    slots = sequences.assign_slots([7, 8])
    for step in range(20):
        asked = np.tile([1.0, 1, 1, 1, 0, 0, 0, 0], (2, 1))
        sequences.observe(slots, asked, np.array([0.0, 4.0]), step)
    first = gains.accept_rates[sequences.exponents(slots, gains, 20)][:, 0]
    assert first[0] < 0.25 and first[1] > 0.75
    later = gains.accept_rates[sequences.exponents(slots, gains, 2000)][:, 0]
    assert later == pytest.approx(0.5, abs=0.05)


def test_slots_are_reused_and_reset() -> None:
    sequences = SequenceAcceptance(4)
    kept = sequences.assign_slots([1])
    for handle in range(2, 500):
        at = sequences.assign_slots([1, handle])
        assert at[0] == kept[0] != at[1]
        assert sequences.remembered_drafts(at, handle)[1] == 0.0
        sequences.observe(at, np.ones((2, 4)), np.array([1.0, 4.0]), handle)
    assert sequences.assign_slots([1])[0] == kept[0]
    assert sequences.remembered_drafts(kept, 499)[0] > 5
    assert max(int(sequences.assign_slots([handle])[0]) for handle in range(400, 500)) < 300
