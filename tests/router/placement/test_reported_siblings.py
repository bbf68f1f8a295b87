"""What a worker reports of siblings that wait for a prefix, and what a router makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.ipc.counters import SpeculationStatus
from engine.process.meter import StepMeter
from protocol.block_keys import block_keys
from protocol.requests import Request, request_digest
from router.generation.placer import Placer
from router.placement.choose import choose_placement
from router.placement.ledger import WorkLedger
from tests.engine.scheduler_harness import ROOT, SchedulerHarness
from tests.router.placement.test_expected_prefixes import SiblingPool

PROMPT = tuple(range(8192))


@pytest.fixture(autouse=True)
def choose_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.placer.choose_placement", choose_placement)


class ReportingWorker:
    """The scheduler of an engine that computes what one router places, and its reports."""

    def __init__(self, placer: Placer, ledger: WorkLedger, rows: int) -> None:
        self.harness = SchedulerHarness(pages=4000, rows=rows, chunk=512)
        parts = {"scheduler": self.harness.scheduler, "manager": self.harness.manager}
        engine: Any = SimpleNamespace(
            **parts, speculator=None, step_time=SimpleNamespace(known=None)
        )
        self._meter = StepMeter(engine, lambda: 0.0, SpeculationStatus())
        self._placer, self._ledger = placer, ledger
        self._digests: list[int] = []

    def send(self, name: str, prompt: tuple[int, ...]) -> str:
        """Place a request and give it to the engine, as the front does. Return its worker."""
        request = Request(id=name, prompt=prompt, cache_root=ROOT)
        placed = self._placer.place(request, block_keys(ROOT, prompt))
        assert placed is not None
        self._placer.open_ticket(placed, name)
        self._digests.append(request_digest(name))
        message = self._placer.submit_message(placed, request)
        sequence = self.harness.prefill(len(self._digests), request)
        sequence.expected_tokens = message.uncached_tokens
        return placed.choice.chosen.p.instance

    def report(self, instance: str) -> int:
        """Report the load; return the tokens that the router takes for other routers' work."""
        beat = self._meter.beat()
        load = (beat.queued_tokens, beat.queued_prompts, beat.computed_tokens)
        self._ledger.report(instance, *load, self._digests)
        return self._ledger.queues[instance].others


@pytest.mark.parametrize("rows", [1, 64])  # siblings wait for a row, or for the prefix
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_siblings_that_wait_are_no_work_of_other_routers(steps: int, rows: int) -> None:
    pool = SiblingPool(0, 1)
    worker = ReportingWorker(pool.placer, pool.ledger, rows)
    [instance] = {worker.send(f"r{number}", PROMPT) for number in range(16)}
    for _ in range(steps):
        worker.harness.step()
    assert worker.report(instance) == 0


def test_what_another_router_has_sent_still_counts() -> None:
    pool = SiblingPool(0, 1)
    worker = ReportingWorker(pool.placer, pool.ledger, rows=64)
    instance = worker.send("own", PROMPT)
    worker.harness.prefill(99, Request(id="other", prompt=tuple(range(9000, 13000))))
    worker.harness.step()
    assert worker.report(instance) == pytest.approx(4000, rel=0.1)
