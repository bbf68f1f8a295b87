"""A worker's figures from its counters, its page of metrics, and the line of `baton status`."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from cluster.cli.status_view import _wall
from cluster.worker.metrics import ceiling_metrics, utilisation_metrics, work_metrics
from cluster.worker.utilisation import UtilisationSample, WorkerLimits, compute_utilisation
from engine.ipc.counters import BucketCounts, EngineCounters, WorkDone
from engine.ipc.settings import MachineCeilings
from protocol.registry.directory import WorkerUtilisation
from router.overview.pool_view import WallView

MACHINE = WorkerLimits(
    MachineCeilings(flops=100.0, bytes=10.0),
    link=5.0,
    element_bytes=4,
    kv_shrink=3.9,
    wire_shrink=1.0,
    gpu=False,
)


def sample(
    at: float, busy: float, done: WorkDone, rows: int = 0, received: int = 0
) -> UtilisationSample:
    counters = EngineCounters(
        prefill_tokens=int(100 * at),
        step_seconds=BucketCounts([], busy),
        decode_rows=rows,
        done=done,
    )
    return UtilisationSample(at, counters, received, waited_s=at / 2)


def test_figures_are_of_what_lies_between_two_samples() -> None:
    before = WorkDone(flops=1000.0, weight_bytes=500.0, kv_bytes=50.0, decode_steps=7, seconds=3.0)
    now = before.plus(
        WorkDone(
            flops=200.0,
            weight_bytes=15.0,
            kv_bytes=5.0,
            decode_steps=2,
            seconds=8.0,
            kv_seconds=6.0,
            starved_seconds=2.0,
        )
    )
    then, later = sample(0.0, 1.0, before, rows=3), sample(10.0, 5.0, now, rows=9, received=20)
    found = compute_utilisation(then, later, MACHINE, drafts=True)
    assert found == WorkerUtilisation(
        seconds=8.0,
        busy=0.5,
        prompt_tokens_s=1000 / 8,
        compute=200 / (4 * 100),
        bandwidth=20 / (4 * 10),
        capacity=0.75,
        network=20 / (10 * 5),
        starved=0.25,
        kv_wait=0.5,
        batch=3.0,
        kv_share=0.25,
        element_bytes=4,
        kv_shrink=3.9,
        wire_shrink=1.0,
        gpu=False,
        drafts=True,
    )
    assert found.is_valid


def test_too_little_time_says_nothing_and_none_divides_by_zero() -> None:
    start = sample(0.0, 0.0, WorkDone())
    assert (
        compute_utilisation(start, sample(0.9, 0.0, WorkDone(seconds=0.9)), MACHINE, drafts=False)
        is None
    )
    unknown = MACHINE._replace(ceilings=MachineCeilings(), link=0.0)
    idle = compute_utilisation(
        start, sample(2.0, 0.0, WorkDone(seconds=2.0)), unknown, drafts=False
    )
    assert idle is not None
    assert idle.is_valid
    assert (idle.busy, idle.compute, idle.network, idle.batch) == (0.0, 0.0, 0.0, 0.0)


def test_no_share_is_above_one() -> None:
    """As when a model fits the cache better than what its bandwidth was measured with."""
    start = sample(0.0, 0.0, WorkDone())
    much = WorkDone(flops=1e9, weight_bytes=1e9, seconds=2.0, kv_seconds=2.1)
    found = compute_utilisation(start, sample(2.0, 2.2, much, received=1000), MACHINE, drafts=False)
    assert found is not None
    assert found.is_valid
    assert (found.busy, found.compute, found.bandwidth, found.network) == (1.0, 1.0, 1.0, 1.0)


def test_work_of_two_lives_adds_up() -> None:
    one = WorkDone(1.0, 2.0, 3.0, 4, 5.0, 6.0, 7.0)
    sum_ = msgspec.msgpack.decode(msgspec.msgpack.encode(one.plus(one)), type=WorkDone)
    assert sum_ == WorkDone(2.0, 4.0, 6.0, 8, 10.0, 12.0, 14.0)


def test_the_page_has_ceilings_that_are_known() -> None:
    labels = ["m", "decode", "r"]
    [full] = ceiling_metrics(MACHINE, 4096, labels)
    assert {s.labels["wall"]: (s.labels["unit"], s.value) for s in full.samples} == {
        "compute": ("flop_per_second", 100.0),
        "bandwidth": ("bytes_per_second", 10.0),
        "capacity": ("tokens", 4096.0),
        "network": ("bytes_per_second", 5.0),
    }
    [none] = ceiling_metrics(None, 0, labels)
    assert none.samples == []
    shown = {s.name: s for metric in utilisation_metrics(None, labels) for s in metric.samples}
    assert {s.value for s in shown.values()} == {0.0}
    counted = {
        s.name: s.value for m in work_metrics(WorkDone(flops=7.0), labels[:2]) for s in m.samples
    }
    assert counted["baton_engine_flops_total"] == 7.0


@pytest.mark.parametrize("wall", ["bandwidth", None])
def test_the_line_of_status(wall: str | None) -> None:
    view = WallView(
        role="decode", wall=wall, busy=1.0, utilization={}, techniques=[], text="as it is"
    )
    file = io.StringIO()
    Console(file=file, width=80).print(_wall(view))
    assert file.getvalue() == "wall      decode: as it is\n"
