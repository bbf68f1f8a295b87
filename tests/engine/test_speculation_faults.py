"""Whatever a proposer does, it is its own end at most: nobody's text, and no page."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Phase
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_lengths import FixedDraftLength, StepOutcome
from engine.speculation.control.speculator import Speculator
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.proposer import Proposer, VerifiedStep
from tests.engine.conftest import drain, request
from tests.engine.proposers import RandomDraft
from tests.engine.schedules import Arrival, Schedule
from tests.engine.speculating import SpeculatingRunner

CALLS = 5
"""After so many steps it goes wrong."""

VOCAB = 320


class Faulty(RandomDraft):
    """Goes wrong in ``where``; ``drafts`` is what it then proposes, where so much is wanted."""

    def __init__(self, where: str, drafts: Any = None) -> None:
        super().__init__(VOCAB, 4, width=2)
        self.wants_hidden = where == "observe"
        self._where, self._drafts, self._calls = where, drafts, 0

    def passes(self, nodes: int) -> int:
        if self._fails("passes"):
            raise OverflowError("too many passes")
        return super().passes(nodes)

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

    def observe(self, step: VerifiedStep) -> None:
        if self._fails("observe"):
            raise FloatingPointError("dazzled")

    def forget(self, leases: Sequence[int]) -> None:
        if self._fails("forget"):
            raise KeyError(leases[0])


class FaultyLengths(FixedDraftLength):
    """Goes wrong in ``where``; ``lengths`` is what it then decides."""

    def __init__(self, where: str, lengths: Any = None) -> None:
        super().__init__(
            0 if where == "skips_observation" else 4
        )  # which is asked where none are wanted
        self._where, self._lengths, self._calls = where, lengths, 0

    def _fail(self, where: str) -> None:
        self._calls += where == self._where
        if where == self._where and self._calls > CALLS and self._lengths is None:
            raise ZeroDivisionError(where)

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        self._fail("choose_lengths")
        if self._lengths is not None and self._calls > CALLS:
            decided: Sequence[int] = self._lengths
            return decided
        return super().choose_lengths(decoding, chunk_tokens)

    def skips_observation(self) -> bool:
        self._fail("skips_observation")
        return super().skips_observation()

    @property
    def idle(self) -> bool:
        self._fail("idle")
        return False

    def observe(self, outcome: StepOutcome) -> None:
        self._fail("observe")

    def speedups(self) -> tuple[float, float]:
        self._fail("speedups")
        return super().speedups()


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
def lives(tiny: DecoderModel) -> SpeculatingRunner:
    return SpeculatingRunner(tiny, None, count=10)


def everybody() -> Schedule:
    return Schedule(tuple(Arrival(i, i, 0, 0.0, None) for i in range(10)), 60, 64, 8, (1.0,))


def dropped(lives: SpeculatingRunner, faulty: Faulty) -> str:
    """Live with it; why it was dropped."""
    lives.with_(lambda engine: faulty, lambda: FixedDraftLength(4)).check(everybody())
    return lives.dropped


@pytest.mark.parametrize("name", NONSENSE)
def test_proposer_with_invalid_drafts_is_dropped(lives: SpeculatingRunner, name: str) -> None:
    reason = dropped(lives, Faulty("propose", NONSENSE[name]))
    assert ("out of ideas" in reason) if name == "raises" else reason


@pytest.mark.parametrize(
    ("where", "why"), [("observe", "dazzled"), ("forget", "KeyError"), ("passes", "too many")]
)
def test_proposer_that_fails_outside_propose_is_dropped(
    lives: SpeculatingRunner, where: str, why: str
) -> None:
    assert why in dropped(lives, Faulty(where))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40, -(2**40)])
def test_token_ids_outside_the_vocabulary_are_rejected_drafts(
    lives: SpeculatingRunner, token: int
) -> None:
    assert not dropped(lives, Faulty("propose", lambda w: drafts(w, torch.full((sum(w),), token))))


def test_repeated_token_below_one_parent_gives_the_same_text(lives: SpeculatingRunner) -> None:
    again = Faulty("propose", lambda w: drafts(w, torch.full((sum(w),), 9), [-1] * sum(w)))
    assert not dropped(lives, again)


@pytest.mark.parametrize("where", ["choose_lengths", "skips_observation", "idle", "observe"])
def test_length_policy_that_fails_is_dropped_with_the_proposer(
    lives: SpeculatingRunner, where: str
) -> None:
    proposer = Faulty("")
    proposer.wants_hidden = True
    lives.with_(lambda engine: proposer, lambda: FaultyLengths(where)).check(everybody())
    assert lives.dropped == f"ZeroDivisionError: {where}"


@pytest.mark.parametrize("decided", [[1] * 99, [None, "x"], 7])
def test_length_policy_with_invalid_lengths_is_dropped(
    lives: SpeculatingRunner, decided: Any
) -> None:
    lives.with_(lambda engine: Faulty(""), lambda: FaultyLengths("choose_lengths", decided))
    lives.check(everybody())
    assert lives.dropped


def test_length_policy_that_cannot_report_is_dropped() -> None:
    speculator = Speculator(Faulty(""), FaultyLengths("speedups"), VOCAB)
    told = [speculator.status() for _ in range(CALLS + 2)]
    assert told[CALLS - 1].active and not told[CALLS].active
    assert str(told[-1]) == "dropped: ZeroDivisionError: speedups" and told[-1].proposer == "random"


def test_proposer_without_length_policy_is_dropped() -> None:
    speculator = Speculator(Faulty(""), FixedDraftLength(4), VOCAB)

    def fails(proposer: Proposer) -> FixedDraftLength:
        raise MemoryError(proposer.name)

    speculator.use_policy(fails)
    assert speculator.dropped == "MemoryError: random" and speculator.proposer is None


@pytest.mark.parametrize("where", ["propose", "observe", "forget", "passes", "lengths"])
def test_dropped_proposer_is_released(
    where: str, tiny: DecoderModel, lives: SpeculatingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is free for what is served, without waiting for the collector of cycles."""
    monkeypatch.setattr(logging.getLogger("baton.engine"), "disabled", True)  # keeps the traceback
    lengths = FaultyLengths("observe" if where == "lengths" else "")
    engine = lives.with_(lambda engine: Faulty(where), lambda: lengths).engine()
    speculator = engine.speculator
    assert speculator is not None
    alive = weakref.ref(speculator.proposer)
    for handle in range(10):  # that end one after the other
        engine.generate(handle, request(f"{handle}", [5] * 40, max_tokens=4 * (handle + 1)))
    assert len(drain(engine)) == 10
    assert speculator.dropped and alive() is None
    assert speculator.status().proposer == "random"


class Noting(RandomDraft):
    """Notes what it is told to forget."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 4)
        self.forgot: list[int] = []

    def forget(self, leases: Sequence[int]) -> None:
        self.forgot += leases


def test_only_ended_row_leases_are_forgotten() -> None:
    proposer = Noting()
    speculator = Speculator(proposer, FixedDraftLength(1), VOCAB)
    running = [Running(i, request(f"{i}", [5] * 40), Phase.DECODE) for i in range(4)]
    for row, sequence in enumerate(running):
        sequence.take_row(row, 10 + row)
    speculator.propose(running, torch.arange(4), [1] * 4)
    speculator.propose(running[:1], torch.arange(1), [1])  # the others pause
    assert proposer.forgot == []
    running[1].row = -1  # ended, or waits
    running[2].take_row(1, 14)  # preempted, and back
    speculator.propose(running[2:], torch.arange(2), [1, 1])
    assert proposer.forgot == [11, 12]
    running[0].row = running[2].row = -1
    speculator.propose(running[3:], torch.arange(1), [1])
    assert proposer.forgot == [11, 12, 10, 14]
