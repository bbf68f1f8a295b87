"""Decides whether more replicas fit on the nodes, which jumps are large, and how long an update may
take. Pure; `baton scale` and an update by `baton up` use it.

``scale`` collects what the nodes have; what a worker needs is computed from its settings
(``cluster/launch/worker_memory.py``), or is what Serve reserves for each replica.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from cluster.local.start_report import format_size
from cluster.serve.replica_kinds import ReplicaKind, option_name, resource_name
from protocol.roles import ROLES

_SMALL_COUNT = 8
_ROUNDING = 1e-6  # Ray counts GPUs in ten-thousandths


class NodeRoom(NamedTuple):
    """What one node declares: ``slots`` for each kind of replica, and GPUs."""

    slots: Mapping[ReplicaKind, float]
    gpus: float


class MemoryRoom(NamedTuple):
    """Bytes of the machine that new replicas may take, and that each replica needs."""

    free: int
    each: Mapping[ReplicaKind, int]


def find_large_jumps(
    before: Mapping[ReplicaKind, int], wanted: Mapping[ReplicaKind, int]
) -> list[ReplicaKind]:
    """Return the kinds that would more than double and get more than eight replicas."""
    return [k for k, n in wanted.items() if n > max(_SMALL_COUNT, 2 * before.get(k, 0))]


def find_shortages(
    running: Mapping[ReplicaKind, int],
    wanted: Mapping[ReplicaKind, int],
    nodes: Sequence[NodeRoom],
    gpus_each: float,
    memory: MemoryRoom | None,
) -> list[str]:
    """Return what the nodes lack for ``wanted``, each with the largest number that fits.

    ``running``: present replicas of every kind. ``gpus_each``: GPUs of a worker; 0 on CPUs.
    ``memory``: None where it is not known."""
    growing = [kind for kind, count in wanted.items() if count > running.get(kind, 0)]
    found = [text for kind in growing for text in _slot_shortage(kind, wanted[kind], nodes)]
    if gpus_each > 0 and any(kind in ROLES for kind in growing):
        found += _gpu_shortage({**running, **wanted}, nodes, gpus_each)
    if memory is not None and growing:
        found += _memory_shortage(running, wanted, growing, memory)
    return found


def _slot_shortage(kind: ReplicaKind, count: int, nodes: Sequence[NodeRoom]) -> list[str]:
    slots = sum(int(node.slots.get(kind, 0)) for node in nodes)
    if count <= slots:
        return []
    name, declared = option_name(kind), f"{slots} {resource_name(kind)}"
    return [f"{name}={count}: the nodes declare {declared}; at most {name}={slots} fits"]


def _gpu_shortage(
    counts: Mapping[ReplicaKind, int], nodes: Sequence[NodeRoom], gpus_each: float
) -> list[str]:
    places = sum(int(node.gpus / gpus_each + _ROUNDING) for node in nodes)
    workers = sum(counts.get(role, 0) for role in ROLES)
    if workers <= places:
        return []
    gpus = sum(node.gpus for node in nodes)
    return [
        f"{workers} workers: each takes {gpus_each:g} of a GPU, and the nodes have {gpus:g} GPUs;"
        f" {places} workers fit, prefill and decode together"
    ]


def _memory_shortage(
    running: Mapping[ReplicaKind, int],
    wanted: Mapping[ReplicaKind, int],
    growing: Sequence[ReplicaKind],
    memory: MemoryRoom,
) -> list[str]:
    more = {kind: count - running.get(kind, 0) for kind, count in wanted.items()}
    needed = sum(memory.each[kind] * count for kind, count in more.items())
    if needed <= memory.free:
        return []
    asked = " ".join(f"{option_name(kind)}={wanted[kind]}" for kind in growing)
    sizes = ", ".join(f"{option_name(k)} {format_size(memory.each[k])} each" for k in growing)
    fitting = _fitting_counts(running, more, growing, memory, needed)
    most = " ".join(f"{option_name(kind)}={number}" for kind, number in fitting.items())
    fits = f"at most {most} fits" if any(fitting.values()) else "not even one fits"
    return [
        f"{asked} needs {format_size(needed)} of memory ({sizes}),"
        f" {format_size(memory.free)} are free; {fits}"
    ]


def _fitting_counts(
    running: Mapping[ReplicaKind, int],
    more: Mapping[ReplicaKind, int],
    growing: Sequence[ReplicaKind],
    memory: MemoryRoom,
    needed: int,
) -> dict[ReplicaKind, int]:
    """Return counts of the growing kinds that fit: the kind that needs most gets fewer first."""
    fewer = dict(more)
    for kind in sorted(growing, key=lambda each: memory.each[each] * more[each], reverse=True):
        each = max(1, memory.each[kind])
        given_up = min(fewer[kind], max(0, -(-(needed - memory.free) // each)))
        fewer[kind] -= given_up
        needed -= given_up * each
    return {kind: running.get(kind, 0) + fewer[kind] for kind in growing}


def update_deadline(
    times_s: tuple[float, float],
    running: Mapping[ReplicaKind, int],
    counts: Mapping[ReplicaKind, int],
    surges: Mapping[ReplicaKind, int],
    replaced: Collection[ReplicaKind],
) -> tuple[float, str]:
    """Return the seconds for one start, plus a drain where replicas only stop, or a start and a
    drain for each batch of replacements; and why that is more than a start.

    ``times_s``: of a start and of a drain. ``running``, ``counts``: replicas before and after.
    ``surges``: replicas that may start before old ones stop."""
    start_s, drain_s = times_s
    ending = [kind for kind in running if kind in replaced]
    batches = max([0, *(_batches(running[kind], surges[kind]) for kind in ending)])
    if batches:
        each = f"{start_s:.0f} s for a start and {drain_s:.0f} s for a drain"
        seconds = start_s + batches * (start_s + drain_s)
        return seconds, f"replaced in {batches} batch{'es' * (batches > 1)}, each with {each}"
    if any(number > counts[kind] for kind, number in running.items()):
        return start_s + drain_s, f"of which {drain_s:.0f} s for a drain"
    return start_s, ""


def _batches(number: int, surge: int) -> int:
    """Return in how many batches Serve replaces replicas: a fifth of them at a time at least."""
    return ceil(number / max(1, surge, number // 5))
