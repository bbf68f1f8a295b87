"""What is learned of acceptance: of classes, and of sequences in them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.speculation.control.acceptance import EXPONENTS, AcceptanceModel, SequenceAcceptance
from engine.speculation.control.draft_choice import Vector

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


def taught(acceptance: float, nodes: int, most: int, drafts: int = 1000) -> AcceptanceModel:
    draw, gains = random.Random(1), AcceptanceModel(most)
    for _ in range(drafts):
        asked, accepted = chain(draw, acceptance, nodes, most)
        gains.observe(asked, asked, accepted, 1)
    gains.refresh()
    return gains


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.9])
def test_frequencies_of_chains(acceptance: float) -> None:
    learned = taught(acceptance, 6, 6).powers[ONE]
    np.testing.assert_allclose(learned, acceptance ** np.arange(1, 7), atol=0.1)


@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_places_never_reached_follow_from_those_before(acceptance: float) -> None:
    learned = taught(acceptance, 2, 8).powers[ONE]
    np.testing.assert_allclose(learned, acceptance ** np.arange(1, 9), atol=0.15)
    assert (np.diff(learned) <= 0).all()


def test_what_is_not_proposed_costs_nothing() -> None:
    gains, draw = AcceptanceModel(4), random.Random(2)
    for _ in range(500):
        found = np.full(4, float(draw.random() < 0.3))
        gains.observe(np.ones(4), found, found * [1, 1, 0, 0], 1)
    gains.refresh()
    assert gains.rows[ONE] == pytest.approx(0.3, abs=0.08)
    assert gains.powers[ONE][:2] == pytest.approx(0.3, abs=0.08)
    assert gains.powers[ONE][2:].max() < 0.02


def test_an_old_verdict_gives_way() -> None:
    gains = taught(0.0, 2, 4)
    before = gains.drafts
    gains.observe(np.array([1.0, 1.0, 0, 0]), np.ones(4), np.array([1.0, 1.0, 0, 0]), 2048)
    gains.refresh()
    assert before > 100 and gains.drafts < 5
    assert gains.powers[ONE][0] > 0.2


@pytest.mark.parametrize("own", [0.05, 0.5, 0.97])
def test_a_sequence_differs_from_its_class(own: float) -> None:
    gains, luck, draw = taught(0.5, 4, 8), SequenceAcceptance(8), random.Random(3)
    places = luck.places([7])
    assert gains.powers[luck.exponents(places, gains, 0)][0][0] == pytest.approx(0.5, abs=0.1)
    learned = []
    for step in range(200):
        asked, accepted = chain(draw, own, 4, 8)
        luck.observe(places, asked[None], np.array([accepted.sum()]), step)
        learned.append(gains.powers[luck.exponents(places, gains, step)][0][0])
    assert np.mean(learned[20:]) == pytest.approx(own, abs=0.12)


def test_a_sequence_that_is_left_alone_becomes_like_its_class() -> None:
    gains, luck = taught(0.5, 4, 8), SequenceAcceptance(8)
    places = luck.places([7, 8])
    for step in range(20):
        asked = np.tile([1.0, 1, 1, 1, 0, 0, 0, 0], (2, 1))
        luck.observe(places, asked, np.array([0.0, 4.0]), step)
    first = gains.powers[luck.exponents(places, gains, 20)][:, 0]
    assert first[0] < 0.25 and first[1] > 0.75
    later = gains.powers[luck.exponents(places, gains, 2000)][:, 0]
    assert later == pytest.approx(0.5, abs=0.05)


def test_places_are_given_again_and_begin_anew() -> None:
    luck = SequenceAcceptance(4)
    kept = luck.places([1])
    for handle in range(2, 500):
        at = luck.places([1, handle])
        assert at[0] == kept[0] != at[1]
        assert luck.tested(at, handle)[1] == 0.0
        luck.observe(at, np.ones((2, 4)), np.array([1.0, 4.0]), handle)
    assert luck.places([1])[0] == kept[0]
    assert luck.tested(kept, 499)[0] > 5
    assert max(int(luck.places([handle])[0]) for handle in range(400, 500)) < 300
