"""`baton down`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags


@configured(keys.DOWN)
def down(
    flags: Flags,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Of a Ray cluster to remove Baton from; it stays: auto."),
    ] = None,
) -> None:
    """Stop the cluster that `baton up` started, and whatever a killed one left behind."""
    config = settled(flags, keys.DOWN).config
    from cluster.down import down as run
    from protocol.errors import StartupError

    try:
        if address is not None:
            from cluster import attached

            raise typer.Exit(attached.down(address, typer.echo))
        raise typer.Exit(run(config.cluster, config.drain_s, typer.echo))
    except StartupError as e:
        raise failure(e) from None
