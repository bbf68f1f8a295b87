"""`baton up`."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags


@configured(keys.UP)
def up(
    flags: Flags,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="Deploy on the Ray cluster there, from one of its nodes: auto."
        ),
    ] = None,
) -> None:
    """Start a cluster on this machine: workers, router, Redis, Ray; or deploy, or update, on a Ray
    cluster that runs."""
    if address is not None:
        _deploy(flags, address)
    config = settled(flags, keys.UP).config
    from cluster.config import assemble
    from cluster.up import up as run

    raise typer.Exit(run(assemble.launch(config), config.model.path, detach=detach))


def _deploy(flags: Flags, address: str) -> NoReturn:
    needs = ("redis.url", "security.token", "security.secret")
    config = settled(flags, keys.UP, needs).config
    from cluster import attached
    from cluster.config import assemble

    launch, routers = assemble.launch(config), config.router.replicas
    raise typer.Exit(attached.up(launch, config.model.path, address, routers))
