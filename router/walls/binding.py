"""Which wall binds a pool: a pure function of its workers' figures.

    pages lack, and compute is not full       -> capacity
    KV is waited for, and the link is in use  -> network
    steps run less than half of the time      -> none: idle
    the more utilised of compute, bandwidth   -> that one, from a quarter of its ceiling on
    neither                                   -> none: overhead

The first two come first because they leave an engine idle. Below a quarter of every ceiling it is
the overhead of a step that binds: launches, Python, drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from protocol.registry.directory import WorkerRecord
from protocol.registry.worker_utilisation import WALLS, Wall, Walls
from router.walls.techniques import Pool, Technique, techniques

Why: TypeAlias = Literal["", "idle", "overhead"]

STARVED = 0.2
"""Share of the time in which pages lack, from which capacity binds ..."""
FULL = 0.8
"""... unless so much of compute is used: more sequences would then only wait elsewhere."""
WAITING = 0.3
"""Sequences that wait for KV alone, from which the network binds, ..."""
LINK = 0.3
"""... if so much of a link is used: else it is not the link that they wait for."""
IDLE = 0.5
"""Share of the time in which steps run, below which nothing binds."""
OVERHEAD = 0.25
"""Utilisation below which neither compute nor bandwidth binds."""


class Binding(NamedTuple):
    """``wall`` None: none binds, ``why``."""

    wall: Wall | None
    why: Why = ""


def binding(pool: Walls) -> Binding:
    """``pool``: its workers' figures together, see ``together``."""
    if pool.starved >= STARVED and pool.compute * pool.busy < FULL:
        return Binding("capacity")
    if pool.kv_wait >= WAITING and pool.network >= LINK:
        return Binding("network")
    if pool.busy < IDLE:
        return Binding(None, "idle")
    wall: Wall = "compute" if pool.compute > pool.bandwidth else "bandwidth"
    return Binding(wall) if pool.of(wall) >= OVERHEAD else Binding(None, "overhead")


def together(workers: Sequence[Walls]) -> Walls:
    """Of at least one worker: means, those of steps weighted with the time in which steps ran; of
    links the busiest. What is on is on where all have it."""
    assert workers
    first = workers[0]

    def mean(name: str) -> float:
        return sum(float(getattr(w, name)) for w in workers) / len(workers)

    busy = sum(w.busy for w in workers)

    def of_steps(name: str) -> float:
        total = sum(w.busy * float(getattr(w, name)) for w in workers)
        return total / busy if busy else 0.0

    return msgspec.structs.replace(
        first,
        **{name: mean(name) for name in ("seconds", "busy", "capacity", "starved")},
        **{name: of_steps(name) for name in ("compute", "bandwidth", "batch", "kv_share")},
        **{
            name: max(getattr(w, name) for w in workers)
            for name in ("network", "kv_wait", "kv_shrink", "wire_shrink")
        },
        drafts=all(w.drafts for w in workers),
    )


__all__ = ["WALLS", "Binding", "binding", "together"]


# MERGED router.walls.pools
# From what workers say of themselves to the walls of both pools.

ROLES = ("prefill", "decode")


class PoolWall(NamedTuple):
    """``figures`` None: its workers have not said anything yet, or there is none."""

    role: str
    figures: Walls | None
    binding: Binding
    techniques: Sequence[Technique]  # that relax what binds, the best first


def pool_walls(records: Iterable[WorkerRecord]) -> list[PoolWall]:
    """Of each role. Workers that drain take nothing new, and do not count."""
    serving = [record for record in records if not record.draining]
    return [_pool(role, [r for r in serving if r.role == role]) for role in ROLES]


def _pool(role: str, workers: list[WorkerRecord]) -> PoolWall:
    known = [record.walls for record in workers if record.walls is not None]
    if not known:
        return PoolWall(role, None, Binding(None), [])
    pool = Pool(
        role,
        len(workers),
        together(known),
        waiting=sum(record.waiting for record in workers),
        max_batch=min(record.max_batch for record in workers),
    )
    bound = binding(pool.figures)
    return PoolWall(role, pool.figures, bound, techniques(pool, bound.wall))


# MERGED router.walls.gauges
# The walls of the pools, as a router's metrics. ``role`` is the pool's.

NONE = "none"


class WallGauges:
    def __init__(self, registry: CollectorRegistry, model: str, replica: str) -> None:
        self._model, self._replica = model, replica

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            names = ["model", "role", *labels, "replica"]
            return Gauge(f"baton_{name}", text, names, registry=registry)

        self._binding = gauge(
            "binding_wall", "1: this wall binds the pool; none: none does", "wall"
        )
        self._used = gauge(
            "pool_wall_utilization_ratio", "Of the wall's ceiling, the pool's workers", "wall"
        )
        self._busy = gauge("pool_busy_ratio", "Of the last seconds: steps ran, on average")
        self._gains = gauge(
            "wall_gain_ratio",
            "Tokens per second that a technique would bring the pool, over those now",
            *("wall", "technique"),
        )

    def show(self, pools: Iterable[PoolWall]) -> None:
        """As they are now."""
        for gauge in (self._binding, self._used, self._busy, self._gains):
            gauge.clear()
        for pool in pools:
            self._show(pool)

    def _show(self, pool: PoolWall) -> None:
        bound = pool.binding.wall or NONE
        of = self._model, pool.role
        for wall in (*WALLS, NONE):
            self._binding.labels(*of, wall, self._replica).set(wall == bound)
        if pool.figures is None:
            return
        for wall in WALLS:
            self._used.labels(*of, wall, self._replica).set(pool.figures.of(wall))
        self._busy.labels(*of, self._replica).set(pool.figures.busy)
        for technique in pool.techniques:
            self._gains.labels(*of, bound, technique.name, self._replica).set(technique.gain)
