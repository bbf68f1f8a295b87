"""Grammars that wait for the end of the reasoning, under speculation and after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lib.engines import engine_config
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Sequence as Running
from engine.scheduling.step_policy import plan_decode_step
from engine.speculation.control.speculator import Speculator
from protocol.requests import Request
from tests.engine.conftest import load_model
from tests.engine.grammars import Constrained
from tests.engine.proposers import Oracle
from tests.engine.speculating import CheckedEngine, RandomLengths
from tests.engine.thinking import BUDGET, EOS, assert_thought, thinking_folder, thinking_request

VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_folder(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def constrained(folder: Path) -> Constrained:
    return Constrained(folder, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[Request]:
    return [thinking_request(f"r{i}", [5 + i, 6, 7], folder, seed=i) for i in range(12)]


def new_engine(model: DecoderModel, constrained: Constrained) -> CheckedEngine:
    config = engine_config(pages=64, max_batch=8, chunk=64, max_model_len=1024)
    return CheckedEngine(constrained, model, config, plan_decode_step, lambda: 0.0)


def texts(engine: CheckedEngine, asked: list[Request]) -> list[list[int]]:
    for handle, wanted in enumerate(asked):
        engine.generate(handle, wanted)
    while planned := engine.plan():
        engine.run(planned)
    return [[token.token for token in engine.said[handle]] for handle in range(len(asked))]


@pytest.fixture(scope="module")
def plain(model: DecoderModel, constrained: Constrained, asked: list[Request]) -> list[list[int]]:
    return texts(new_engine(model, constrained), asked)


def test_the_reasoning_ends_within_its_budget_and_the_schema_follows(
    constrained: Constrained, plain: list[list[int]]
) -> None:
    end = constrained.text.token_to_id("</think>")
    assert end is not None
    for tokens in plain:
        assert_thought(constrained, tokens)
    assert any(tokens.index(end) == BUDGET for tokens in plain), "some are forced"


@pytest.mark.parametrize("width", [1, 2])
def test_drafts_change_nothing(
    model: DecoderModel,
    constrained: Constrained,
    asked: list[Request],
    plain: list[list[int]],
    width: int,
) -> None:
    known = {r.id: [*r.prompt, *text] for r, text in zip(asked, plain, strict=True)}

    def text(sequence: Running) -> list[int]:
        return known[sequence.request.id]

    engine = new_engine(model, constrained)
    proposer = Oracle(text, VOCAB, 8, right=0.8, width=width)
    engine.speculate(Speculator(proposer, RandomLengths(7), VOCAB))
    assert texts(engine, asked) == plain
    counts = engine.scheduler.counters.speculation
    assert 0 < counts.accepted_tokens < counts.draft_tokens


def test_a_request_goes_on_from_any_token(
    model: DecoderModel, constrained: Constrained, asked: list[Request], plain: list[list[int]]
) -> None:
    whole = plain[0]
    cuts = range(1, len(whole))
    rest = [asked[0].resumed(whole[:cut]) for cut in cuts]
    assert texts(new_engine(model, constrained), rest) == [whole[cut:] for cut in cuts]
