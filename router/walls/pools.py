"""From what workers say of themselves to the walls of both pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.directory import WorkerRecord
from protocol.walls import Walls
from router.walls.binding import Binding, binding, together
from router.walls.techniques import Pool, Technique, techniques

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
