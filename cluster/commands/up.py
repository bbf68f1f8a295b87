"""`baton up`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags


@configured(keys.UP)
def up(
    flags: Flags,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves.")] = False,
) -> None:
    """Start a cluster on this machine: workers, router, Redis, Ray."""
    config = settled(flags, keys.UP).config
    from cluster.config import assemble
    from cluster.up import up as run

    raise typer.Exit(run(assemble.launch(config), config.model.path, detach=detach))
