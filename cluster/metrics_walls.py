"""What a worker tells of its walls: work, ceilings, and how much of these is used."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.metric_families import LABELS, counter, counter_by, gauge
from cluster.walls import Machine
from engine.work_done import WorkDone
from protocol.walls import WALLS, Walls


def work(done: WorkDone, labels: list[str]) -> Iterator[Metric]:
    """``labels``: model and role."""
    yield counter("engine_flops", "Floating point operations of steps", labels, done.flops)
    moved = (("weights", done.weight_bytes), ("kv", done.kv_bytes))
    yield counter_by("kind", "engine_bytes", "Bytes that steps moved in memory", labels, moved)
    text = "Seconds in which the next sequence waited for pages of KV"
    yield counter("kv_starved_seconds", text, labels, done.starved_seconds)


def use(now: Walls | None, labels: list[str]) -> Iterator[Metric]:
    """``labels``: model, role and replica. Before anything is known nothing is used."""
    text = "Of the wall's ceiling, over the last seconds; compute and bandwidth: while steps ran"
    ratio = GaugeMetricFamily(
        "baton_wall_utilization_ratio", text, labels=[*LABELS, "replica", "wall"]
    )
    for wall in WALLS:
        ratio.add_metric([*labels, wall], 0.0 if now is None else now.of(wall))
    yield ratio
    busy, waiting = (0.0, 0.0) if now is None else (now.busy, now.kv_wait)
    yield gauge("engine_busy_ratio", "Of the last seconds: steps ran", labels, busy)
    yield gauge("kv_transfers_awaited", "Sequences that wait for KV alone", labels, waiting)


def ceilings(of: Machine | None, kv_tokens: int, labels: list[str]) -> Iterator[Metric]:
    """What is not known has no series."""
    text = "What this worker can do at most, measured or declared"
    names = [*LABELS, "replica", "wall", "unit"]
    metric = GaugeMetricFamily("baton_ceiling", text, labels=names)
    flops, bytes_, link = (0.0, 0.0, 0.0)
    if of is not None:
        flops, bytes_, link = of.ceilings.flops, of.ceilings.bytes, of.link
    for wall, unit, value in (
        ("compute", "flop_per_second", flops),
        ("bandwidth", "bytes_per_second", bytes_),
        ("capacity", "tokens", float(kv_tokens)),
        ("network", "bytes_per_second", link),
    ):
        if value:
            metric.add_metric([*labels, wall, unit], value)
    yield metric
