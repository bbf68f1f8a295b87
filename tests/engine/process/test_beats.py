"""What an engine says of its prompts while it computes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.scheduling.step_policy import StepPlan
from tests.engine.conftest import request
from tests.engine.slots.served import PROMPT, WAIT_S, serving, shape_of


def test_a_prompt_is_load_before_its_first_step_and_less_after_each(
    make_engine: Callable[..., Engine], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other routers once found a worker idle while it computed a prompt in one step."""
    engine, go_on = make_engine(chunk=64), threading.Semaphore(0)
    run = engine.run

    def slow(plan: StepPlan) -> list[TokenOut]:
        assert go_on.acquire(timeout=WAIT_S)
        return run(plan)

    monkeypatch.setattr(engine, "run", slow)
    with serving(engine, tiny_folder, shape_of(engine)) as served:
        frame_bytes = served.arena.shape.slot_bytes
        served.send(m.Prefill(1, request("1", PROMPT), frame_bytes, Codec.RAW))
        left = len(PROMPT)
        while left > 0:
            served.until(
                lambda left=left: any(  # type: ignore[misc]
                    (b.queued_tokens, b.computed_tokens) == (left, len(PROMPT) - left)
                    for b in served.beats
                ),
                f"{left} tokens left",
            )
            assert served.beats[-1].prompts_taken == 1
            assert served.beats[-1].queued_prompts == 1
            go_on.release()
            left -= 64
        served.until(lambda: served.beats[-1].queued_prompts == 0, "nothing left")
        served.send(m.Drop(1))


def test_a_sibling_that_waits_counts_with_what_its_router_expects(
    make_engine: Callable[..., Engine], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, go_on = make_engine(chunk=64), threading.Semaphore(0)
    run = engine.run

    def slow(plan: StepPlan) -> list[TokenOut]:
        assert go_on.acquire(timeout=WAIT_S)
        return run(plan)

    monkeypatch.setattr(engine, "run", slow)
    with serving(engine, tiny_folder, shape_of(engine)) as served:
        size = served.arena.shape.slot_bytes
        served.send(m.Prefill(1, request("1", PROMPT), size, Codec.RAW))
        served.send(m.Prefill(2, request("2", PROMPT), size, Codec.RAW, 20))
        go_on.release()
        go_on.release()
        served.until(
            lambda: any(
                (b.queued_prompts, b.queued_tokens + b.computed_tokens) == (2, len(PROMPT) + 20)
                for b in served.beats
            ),
            "one is computed, and the other waits for it",
        )
        go_on.release(100)
        served.until(lambda: served.beats[-1].queued_prompts == 0, "nothing left")
        for handle in (1, 2):
            served.send(m.Drop(handle))


def test_a_prompt_whose_grammar_is_refused_has_been_taken(
    make_engine: Callable[..., Engine], tiny_folder: Path
) -> None:
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as served:
        served.send(m.Generate(1, request("1", PROMPT, grammar="no grammar")))
        served.wait(m.RequestRefused, 1)
        served.until(lambda: bool(served.beats) and served.beats[-1].prompts_taken == 1)
        assert served.beats[-1].queued_prompts == 0
