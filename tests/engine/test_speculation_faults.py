"""Whatever a proposer does, it is its own end at most: nobody's text, and no page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model import Model
from engine.sequence import Sequence as Running
from engine.speculation.drafts import Drafts
from engine.speculation.lengths import FixedLength
from engine.speculation.proposer import Advance
from tests.engine.proposers import RandomDraft
from tests.engine.schedules import Arrival, Schedule
from tests.engine.speculating import Speculating

CALLS = 5
"""After so many steps it goes wrong."""

VOCAB = 320


class Faulty(RandomDraft):
    """Goes wrong in ``where``; ``drafts`` is what it then proposes, where so much is wanted."""

    def __init__(self, where: str, drafts: Any = None) -> None:
        super().__init__(VOCAB, 4, width=2)
        self.wants_hidden = where == "saw"
        self.caught_up_s = 0.0
        self._where, self._drafts, self._calls = where, drafts, 0

    def _fails(self, where: str) -> bool:
        if where != self._where:
            return False
        self._calls += 1
        return self._calls > CALLS

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        if self._fails("propose"):
            if self._drafts is None:
                raise RuntimeError("out of ideas")
            drafts: Drafts = self._drafts(wanted)
            return drafts
        return super().propose(sequences, rows, wanted)

    def saw(self, advance: Advance) -> None:
        if self._fails("saw"):
            raise FloatingPointError("dazzled")

    def forget(self, seatings: Sequence[int]) -> None:
        if self._fails("forget"):
            raise KeyError(seatings[0])


def drafts(counts: list[int], tokens: Any, parents: list[int] | None = None) -> Drafts:
    return Drafts(counts, torch.as_tensor(tokens), parents)


NONSENSE: dict[str, Any] = {
    "raises": None,  # w: nodes wanted for each
    "more nodes than wanted": lambda w: drafts([9] * len(w), [5] * 9 * len(w)),
    "fewer than none": lambda w: drafts([-1] * len(w), [5]),
    "too few counts": lambda w: drafts([1] * (len(w) - 1), [5] * (len(w) - 1)),
    "too few tokens": lambda w: drafts([2] * len(w), [5] * len(w)),
    "no integers": lambda w: drafts([1] * len(w), [0.5] * len(w)),
    "another shape": lambda w: drafts([1] * len(w), [[5]] * len(w)),
    "too few parents": lambda w: drafts([2] * len(w), [5, 6] * len(w), [-1]),
    "its own parent": lambda w: drafts([2] * len(w), [5, 6] * len(w), [-1, 1] * len(w)),
    "a parent of another": lambda w: drafts([1] * len(w), [5] * len(w), [0] * len(w)),
    "a parent before the root": lambda w: drafts([1] * len(w), [5] * len(w), [-2] * len(w)),
    "nothing": lambda w: None,
}


@pytest.fixture(scope="module")
def lives(tiny: Model) -> Speculating:
    return Speculating(tiny, None)


def everybody() -> Schedule:
    return Schedule(tuple(Arrival(i, i, 0, 0.0, None) for i in range(10)), 60, 64, 8, (1.0,))


def dropped(lives: Speculating, faulty: Faulty) -> str:
    """Live with it; why it was dropped."""
    lives.with_(lambda engine: faulty, lambda: FixedLength(4)).check(everybody())
    return lives.dropped


@pytest.mark.parametrize("name", NONSENSE)
def test_who_proposes_nonsense_is_dropped(lives: Speculating, name: str) -> None:
    reason = dropped(lives, Faulty("propose", NONSENSE[name]))
    assert ("out of ideas" in reason) if name == "raises" else reason


@pytest.mark.parametrize(("where", "why"), [("saw", "dazzled"), ("forget", "KeyError")])
def test_who_fails_elsewhere_is_dropped(lives: Speculating, where: str, why: str) -> None:
    assert why in dropped(lives, Faulty(where))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40, -(2**40)])
def test_tokens_that_there_are_not_are_wrong_drafts(lives: Speculating, token: int) -> None:
    assert not dropped(lives, Faulty("propose", lambda w: drafts(w, torch.full((sum(w),), token))))


def test_the_same_token_again_below_one_parent(lives: Speculating) -> None:
    again = Faulty("propose", lambda w: drafts(w, torch.full((sum(w),), 9), [-1] * sum(w)))
    assert not dropped(lives, again)
