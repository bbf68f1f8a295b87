"""A decode worker's speculation: from counters over a page of metrics to `baton status`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from rich.console import Console

from cluster.cli.status_view import speculation_line
from cluster.worker.metrics import speculation_metrics as shown
from engine.ipc.counters import EngineCounters, SpeculationStatus
from router.overview.prometheus_text import MetricsPage, MetricsSnapshot, parse_page, sum_samples
from router.overview.rates import RateWindow
from router.overview.worker_view import SpeculationView, speculation_view


class Worker(Collector):
    def __init__(self, done: EngineCounters, now: SpeculationStatus) -> None:
        self.done, self.now = done, now

    def collect(self) -> Iterator[Metric]:
        return shown(self.done, self.now, ["m", "decode"], "r")

    def page(self) -> MetricsPage:
        registry = CollectorRegistry()
        registry.register(self)
        return parse_page(generate_latest(registry).decode())


def view(worker: Worker) -> SpeculationView | None:
    page = worker.page()
    return speculation_view("t", page, RateWindow(MetricsSnapshot(0.0, {"t": page}), None))


def text(found: SpeculationView) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(speculation_line("abcdef", found))
    return file.getvalue()


def test_nothing_is_shown_while_it_is_off() -> None:
    assert view(Worker(EngineCounters(decode_rows=100), SpeculationStatus())) is None


def test_accepted_drafts_are_shown() -> None:
    worker = Worker(EngineCounters(decode_rows=100), SpeculationStatus("ngram", "", 1.8, 1.7))
    found = view(worker)
    assert found is not None and (found.state, found.acceptance) == ("active", None)
    for _ in range(20):
        worker.done.speculation.step([4, 0], [3, 0], 0.001)
    found = view(worker)
    assert found is not None
    assert (found.proposer, found.acceptance, found.tokens_per_draft) == ("ngram", 0.75, 4)
    assert found.tokens_per_step == pytest.approx(1.6)
    assert (found.predicted_speedup, found.measured_speedup) == (1.8, 1.7)
    said = text(found)
    assert "abcdef ngram  4.0 per step, 75% accepted: 1.60 tokens  speed-up 1.70" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("reason", ["load", "crash"])
def test_dropped_speculation_is_shown(reason: str) -> None:
    worker = Worker(EngineCounters(), SpeculationStatus("draft", "ValueError: no"))
    worker.done.speculation.load_failures = int(reason == "load")
    worker.done.speculation.crashes = int(reason == "crash")
    found = view(worker)
    assert found is not None and (found.state, found.proposer) == ("dropped", "")
    assert "dropped" in text(found)
    page = worker.page()
    assert sum_samples(page, "baton_spec_decode_drops_total", reason=reason) == 1
    assert sum_samples(page, "baton_spec_decode_drops_total") == 1
    worker.now = SpeculationStatus("draft")  # the next engine's
    again = view(worker)
    assert again is not None and again.state == "active"


def test_the_names_are_those_of_vllm() -> None:
    worker = Worker(EngineCounters(), SpeculationStatus("draft"))
    worker.done.speculation.step([3, 2], [2, 0], 0.001)
    page = worker.page()
    of = {"model": "m", "role": "decode"}
    for name, count in (("drafts", 2), ("draft_tokens", 5), ("accepted_tokens", 2)):
        assert sum_samples(page, f"baton_spec_decode_num_{name}_total", **of) == count
    name = "baton_spec_decode_num_accepted_tokens_per_pos_total"
    by_place = [sum_samples(page, name, position=str(place), **of) for place in range(3)]
    assert by_place == [1, 1, 0]


def test_the_documentation_names_every_metric_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    told = set(re.findall(r"`(baton_(?:spec_decode|decode_rows)\w*)", page))
    assert told == set(Worker(EngineCounters(), SpeculationStatus("draft")).page())
