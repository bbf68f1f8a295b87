"""Numbers of replicas, read and set through Ray Serve's interface for external scalers."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.autoscale.aside import Aside
from cluster.sizing.snapshot import Counts, Worker
from protocol.errors import Unavailable
from protocol.roles import ROLES

DEADLINE_S = 5.0


class ServeReplicas:
    """Of Baton's applications, by Ray Serve's interface for scalers that are not its own."""

    changes = True

    def __init__(self) -> None:
        self._aside = Aside("Ray Serve")

    async def targets(self, workers: Sequence[Worker]) -> Counts:
        from cluster import serve_control

        try:
            found = await self._aside(lambda: serve_control.targets(DEADLINE_S), DEADLINE_S)
        except Exception as error:  # Ray has no common type for them
            raise Unavailable(f"numbers of replicas are not known: {_first(error)}") from error
        return Counts(**{role: found.get(role, 0) for role in ROLES})

    async def ask(self, before: Counts, after: Counts) -> None:
        from cluster import serve_control

        for role in ROLES:
            if after.of(role) == before.of(role):
                continue
            ask = serve_control.asking(role, after.of(role), DEADLINE_S)
            try:
                await self._aside(ask, DEADLINE_S)
            except Exception as error:  # likewise
                raise Unavailable(f"{role} replicas are not changed: {_first(error)}") from error


def _first(error: Exception) -> str:
    """What it says, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
