"""Log-probabilities of prompts: those of one forward pass over the whole of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.model.decoder import DecoderModel
from engine.process.server import token_events
from engine.scheduling.step_policy import plan_decode_step
from protocol.requests import Logprobs
from tests.engine.conftest import request

Make = Callable[..., Engine]
PROMPT = [random.Random(3).randrange(3, 320) for _ in range(150)]


def outputs(engine: Engine, handle: int) -> list[TokenOut]:
    out: list[TokenOut] = []
    while step := engine.plan():
        out += [t for t in engine.run(step) if t.handle == handle]
    return out


@pytest.fixture(scope="module")
def whole(tiny: DecoderModel) -> torch.Tensor:
    """Log-probabilities [150, vocab] after each token of the prompt, of one pass over it."""
    engine = Engine(tiny, engine_config(pages=64, chunk=256, max_model_len=1024), plan_decode_step)
    engine.generate(0, request("x", PROMPT, max_tokens=1))
    step = engine.plan()
    batch, _ = engine._stepper._batcher.build(step)
    with torch.inference_mode():
        hidden = tiny.hidden(batch, engine.pool)
        return tiny.logits(hidden).double().log_softmax(dim=-1)


def check(came: list[Logprobs], scores: torch.Tensor, prompt: list[int], top: int) -> None:
    assert len(came) == len(prompt) - 1
    for at, report in enumerate(came):
        row = scores[at]
        own = row[prompt[at + 1]]
        assert report.logprob == pytest.approx(float(own), abs=1e-4)
        assert abs(report.rank - int((row > own).sum()) - 1) <= 1
        values = row.sort(descending=True).values[:top].tolist()
        assert report.top_logprobs == pytest.approx(values, abs=1e-4)
        assert len(report.top_tokens) == top


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("top", [0, 5])
def test_prompt_logprobs_equal_those_of_one_pass(
    make_engine: Make, whole: torch.Tensor, chunk: int, top: int
) -> None:
    engine = make_engine(chunk=chunk)
    engine.generate(0, request("r", PROMPT, prompt_logprobs=top, max_tokens=4))
    engine.generate(1, request("o", PROMPT[:70][::-1], max_tokens=30))
    first, *rest = outputs(engine, 0)
    check(first.prompt_logprobs, whole, PROMPT, top)
    assert [t.prompt_logprobs for t in rest] == [[], [], []]


def test_prompt_logprobs_recompute_a_cached_prefix(make_engine: Make, whole: torch.Tensor) -> None:
    engine = make_engine()
    engine.generate(0, request("before", PROMPT, max_tokens=4))
    plain = [t.token for t in outputs(engine, 0)]
    engine.generate(1, request("r", PROMPT, prompt_logprobs=2, max_tokens=4))
    scored = outputs(engine, 1)
    check(scored[0].prompt_logprobs, whole, PROMPT, 2)
    assert [t.token for t in scored] == plain
    engine.generate(2, request("after", PROMPT, max_tokens=4))
    engine.plan()
    assert engine.scheduler.sequences[2].cached == 128, "what it computed is cached"


def test_resumed_request_does_not_report_prompt_logprobs_again(make_engine: Make) -> None:
    engine = make_engine()
    r = request("r", PROMPT, prompt_logprobs=2, max_tokens=6)
    engine.generate(0, r)
    tokens = [t.token for t in outputs(engine, 0)]
    engine.generate(1, r.resumed(tokens[:3]))
    engine.plan()
    assert engine.scheduler.sequences[1].cached == 128


def test_prompt_logprobs_survive_a_preemption_during_prefill(
    make_engine: Make, whole: torch.Tensor
) -> None:
    engine = make_engine(pages=8, chunk=32)
    engine.generate(0, request("r", PROMPT, prompt_logprobs=1, max_tokens=2))
    for _ in range(3):
        engine.run(engine.plan())
    sequence = engine.scheduler.sequences[0]
    assert len(sequence.prompt_logprobs) == 96
    engine.scheduler._preempt(sequence)
    first, _ = outputs(engine, 0)
    check(first.prompt_logprobs, whole, PROMPT, 1)


def test_prompt_logprobs_precede_the_first_token(make_engine: Make) -> None:
    engine = make_engine()
    engine.prefill(4, request("r", [5, 6, 7], prompt_logprobs=1))
    events = token_events(engine.run(engine.plan()))
    assert [type(event).__name__ for event in events] == ["PromptLogprobs", "TokensDrawn"]
    engine.generate(5, request("one", [5], prompt_logprobs=1, max_tokens=1))
    assert outputs(engine, 5)[0].prompt_logprobs == []
