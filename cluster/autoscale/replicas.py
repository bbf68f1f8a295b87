"""Numbers of workers, by home: what there is to be asked for, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.sizing.snapshot import Counts, Worker
from protocol.roles import ROLES


class Replicas(Protocol):
    """Raises Unavailable: then nothing is known, or nothing was changed for sure. ``changes``:
    somebody starts and ends workers when asked."""

    changes: bool

    async def targets(self, workers: Sequence[Worker]) -> Counts:
        """Workers that are asked for now. ``workers``: those that are there."""
        ...

    async def ask(self, before: Counts, after: Counts) -> None:
        """For other numbers. Returns when that was understood, not when they are there."""
        ...


class NoReplicas:
    """Without Ray: nobody here starts a worker or ends one. Who is there is who was asked for."""

    changes = False

    async def targets(self, workers: Sequence[Worker]) -> Counts:
        staying = [worker.home for worker in workers if worker.state != "leaving"]
        return Counts(**{role: staying.count(role) for role in ROLES})

    async def ask(self, before: Counts, after: Counts) -> None:
        """Whoever reads the lines is asked."""
