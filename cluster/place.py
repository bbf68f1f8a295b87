"""Where replicas are, as it is told to each of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster import events, ray_runtime
from cluster.program import fingerprint
from protocol.errors import StartupError


class Place(msgspec.Struct, frozen=True):
    """Where replicas are. ``events_path``: where they say what they do, on this machine; None: on
    hosts of a cluster, where they listen on their node's address and say it in Ray's logs.
    ``program``: the fingerprint of the one that deployed them."""

    events_path: str | None
    drain_s: float
    program: str

    def check(self) -> None:
        """Raises StartupError on a node with another program: it would run under this one's
        version, and no update would find it."""
        if fingerprint() != self.program:
            raise StartupError(
                f"the node {ray_runtime.node_address()} has another version of Baton than the one"
                " that deploys: bring the same to all nodes, and deploy again"
            )

    def address(self) -> str | None:
        """To listen on; None: as configured."""
        return None if self.events_path is not None else ray_runtime.node_address()

    def say(self, who: str, text: str) -> None:
        line = text if text.startswith(who) else f"{who}: {text}"
        if self.events_path is None:
            print(line, flush=True)
        else:
            events.Writer(Path(self.events_path))(events.Note(line))
