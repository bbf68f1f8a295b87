"""With drafts, text and log-probabilities are what they are without, whatever is proposed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model import Model
from engine.speculation.ngram import NGram
from tests.engine.conftest import load_model
from tests.engine.families import save
from tests.engine.grammars import save_tokenizer
from tests.engine.proposers import Oracle, RandomDraft
from tests.engine.schedules import Arrival, Schedule, schedules
from tests.engine.speculating import AnyLengths, Make, Speculating, constrained

VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save(tmp_path_factory.mktemp("speculation")))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


@pytest.fixture(scope="module")
def lives(model: Model, folder: Path) -> Speculating:
    return Speculating(model, constrained(folder))


def makers(lives: Speculating) -> dict[str, Make]:
    return {
        "ngram": lambda engine: NGram(8),
        "random": lambda engine: RandomDraft(VOCAB, 8),
        "random tree": lambda engine: RandomDraft(VOCAB, 8, width=3),
        "oracle": lambda engine: Oracle(lives.text, VOCAB, 8, right=0.8),
        "oracle tree": lambda engine: Oracle(lives.text, VOCAB, 12, right=0.9, width=2),
    }


def everybody(step: int = 0, **changes: int) -> tuple[Arrival, ...]:
    base = {"priority": 0, "emitted": 0.0, "cancel_after": None, **changes}
    return tuple(Arrival(i, step * i, **base) for i in range(40))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ngram", "random", "random tree", "oracle", "oracle tree"])
def test_full_batches(lives: Speculating, name: str) -> None:
    lives.with_(makers(lives)[name], lambda: AnyLengths(6))
    lives.drafted = lives.accepted = 0
    lives.check(Schedule(everybody(), 300, 64, 32, (1.0,)))
    lives.check(Schedule(everybody(2), 300, 16, 8, (1.0, 60.0)))
    assert lives.accepted < lives.drafted
    assert (lives.accepted > lives.drafted / 4) == name.startswith("oracle")


@pytest.mark.parametrize("name", ["ngram", "random tree", "oracle", "oracle tree"])
def test_few_pages_and_rows(lives: Speculating, name: str) -> None:
    lives.with_(makers(lives)[name], lambda: AnyLengths(8))
    before = lives.preempted
    lives.check(Schedule(everybody(), 12, 64, 8, (1.0,)))
    calm = tuple(Arrival(i, 0, 5, 0.0, None) for i in range(8))
    urgent = tuple(Arrival(i, 6 + i, -5, 0.0, None) for i in range(8, 24))
    lives.check(Schedule(calm + urgent, 256, 64, 8, (1.0,)))
    assert lives.preempted > before


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schedule=schedules(),
    most=st.sampled_from([1, 3, 16]),
    width=st.integers(1, 3),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 9),
)
def test_any_schedule_with_any_drafts(
    lives: Speculating, schedule: Schedule, most: int, width: int, right: float, seed: int
) -> None:
    """Arrivals, preemption, cancellation and resumption; lengths, shapes and rejections."""
    lives.with_(
        lambda engine: Oracle(lives.text, VOCAB, most, right, width, seed),
        lambda: AnyLengths(most, seed),
    ).check(schedule)
