"""`baton scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags


@configured(keys.SCALE)
def scale(
    flags: Flags,
    counts: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N routers=N")],
    address: Annotated[
        str | None, typer.Option("--address", help="Of a Ray cluster, from one of its nodes: auto.")
    ] = None,
) -> None:
    """Change how many workers and routers run; those that go finish or hand over their work."""
    config = settled(flags, keys.SCALE).config
    from cluster import scale as scaling
    from protocol.errors import StartupError

    try:
        wanted = scaling.parse(counts)
        typer.echo(scaling.scale(config.cluster, wanted, address, config.start_deadline_s))
    except StartupError as e:
        raise failure(e) from None
