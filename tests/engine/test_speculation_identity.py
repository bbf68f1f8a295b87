"""With drafts, text and log-probabilities are what they are without, whatever is proposed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.speculation.proposers.draft_model import load_draft
from engine.speculation.proposers.eagle import EagleProposer
from engine.speculation.proposers.medusa import MedusaProposer
from engine.speculation.proposers.ngram import NgramProposer
from engine.speculation.proposers.proposer import Proposer
from tests.engine.conftest import load_model
from tests.engine.families import save
from tests.engine.grammars import save_tokenizer
from tests.engine.heads import EAGLE_CONFIG, eagle_state, medusa_state, write
from tests.engine.proposers import Oracle, RandomDraft
from tests.engine.schedules import Arrival, Schedule, schedules
from tests.engine.speculating import MakeProposer, RandomLengths, SpeculatingRunner, constrained

VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save(tmp_path_factory.mktemp("speculation")))


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def lives(model: DecoderModel, folder: Path) -> SpeculatingRunner:
    return SpeculatingRunner(model, constrained(folder))


@pytest.fixture(scope="module")
def heads(model: DecoderModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random ones, which are right now and then."""
    home = tmp_path_factory.mktemp("heads")
    return {
        "medusa": write(home / "medusa", medusa_state(model), {"medusa_num_heads": 3}),
        "eagle": write(home / "eagle", eagle_state(model), EAGLE_CONFIG),
    }


NAMES = ("ngram", "random", "random tree", "oracle", "oracle tree", "draft", "medusa", "eagle")


def maker(
    lives: SpeculatingRunner, heads: dict[str, Path], folder: Path, name: str
) -> MakeProposer:
    """``draft`` is the model itself: it is right, where nothing but the model decides."""

    def draft(engine: Engine) -> Proposer:
        pages = engine.config.pages
        return load_draft(folder, engine.model, engine.state, pages=pages, most=8)

    return {
        "draft": draft,
        "medusa": lambda engine: MedusaProposer(engine.model, engine.state, heads["medusa"], 8),
        "eagle": lambda engine: EagleProposer(
            engine.model, engine.state, heads["eagle"], engine.config.pages, 8
        ),
        "ngram": lambda engine: NgramProposer(8),
        "random": lambda engine: RandomDraft(VOCAB, 8),
        "random tree": lambda engine: RandomDraft(VOCAB, 8, width=3),
        "oracle": lambda engine: Oracle(lives.text, VOCAB, 8, right=0.8),
        "oracle tree": lambda engine: Oracle(lives.text, VOCAB, 12, right=0.9, width=2),
    }[name]


@pytest.fixture
def chosen(
    lives: SpeculatingRunner, heads: dict[str, Path], folder: Path, request: pytest.FixtureRequest
) -> tuple[str, SpeculatingRunner]:
    """Lives with the proposer of this name."""
    name: str = request.param
    lives.with_(maker(lives, heads, folder, name), lambda: RandomLengths(7))
    return name, lives


def everybody(step: int = 0, **changes: int) -> tuple[Arrival, ...]:
    base = {"priority": 0, "emitted": 0.0, "cancel_after": None, **changes}
    return tuple(Arrival(i, step * i, **base) for i in range(40))  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", NAMES, indirect=True)
def test_speculation_in_full_batches_gives_the_same_text(
    chosen: tuple[str, SpeculatingRunner],
) -> None:
    name, lives = chosen
    lives.check(Schedule(everybody(), 300, 64, 32, (1.0,)))
    lives.check(Schedule(everybody(2)[:24], 300, 16, 8, (1.0, 60.0)))
    assert not lives.dropped and 0 < lives.accepted < lives.drafted
    often = name.startswith(("oracle", "draft"))
    assert (lives.accepted > lives.drafted / 4) == often


@pytest.mark.parametrize("chosen", ["ngram", "oracle tree", "draft", "eagle"], indirect=True)
def test_speculation_with_few_pages_and_rows_gives_the_same_text(
    chosen: tuple[str, SpeculatingRunner],
) -> None:
    _, lives = chosen
    lives.check(Schedule(everybody()[:24], 12, 64, 8, (1.0,)))
    assert lives.preempted
    lives.preempted = 0
    calm = tuple(Arrival(i, 0, 5, 0.0, None) for i in range(8))
    urgent = tuple(Arrival(i, 6 + i, -5, 0.0, None) for i in range(8, 20))
    lives.check(Schedule(calm + urgent, 256, 64, 8, (1.0,)))
    assert lives.preempted and not lives.dropped


@settings(max_examples=settings.default.max_examples // 4)
@given(
    schedule=schedules(),
    most=st.sampled_from([1, 3, 16]),
    width=st.integers(1, 3),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 9),
)
def test_any_schedule_with_any_drafts(
    lives: SpeculatingRunner, schedule: Schedule, most: int, width: int, right: float, seed: int
) -> None:
    """Arrivals, preemption, cancellation and resumption; lengths, shapes and rejections."""
    lives.with_(
        lambda engine: Oracle(lives.text, VOCAB, most, right, width, seed),
        lambda: RandomLengths(most, seed),
    ).check(schedule)
    assert not lives.dropped


@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3-moe"])
def test_speculation_with_windows_and_experts_gives_the_same_text(
    family: str, tmp_path: Path
) -> None:
    others = SpeculatingRunner(load_model(save(tmp_path, family)), None, count=16)
    others.with_(lambda e: Oracle(others.text, VOCAB, 8, 0.8, 2), lambda: RandomLengths(8))
    others.check(Schedule(everybody()[:16], 12, 64, 8, (1.0,)))
    others.check(Schedule(everybody(2)[:16], 256, 512, 32, (1.0, 60.0)))
    assert others.preempted and not others.dropped
    assert 0 < others.accepted < others.drafted
