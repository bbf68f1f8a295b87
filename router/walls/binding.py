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

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from protocol.walls import WALLS, Wall, Walls

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
