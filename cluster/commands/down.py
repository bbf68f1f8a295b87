"""`baton down`."""

from __future__ import annotations

import typer

from cluster.commands.failing import failure
from cluster.options import Cluster, Drain


def down(cluster: Cluster = "default", drain_s: Drain = 30.0) -> None:
    """Stop the cluster that `baton up` started, and whatever a killed one left behind."""
    from cluster.down import down as run
    from protocol.errors import StartupError

    try:
        raise typer.Exit(run(cluster, drain_s, typer.echo))
    except StartupError as e:
        raise failure(e) from None
