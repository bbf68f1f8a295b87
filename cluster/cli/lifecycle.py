"""`baton up`."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from cluster.cli.configured import failure, settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.settle import Flags


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
    from cluster.launch.up import up as run

    raise typer.Exit(run(assemble.launch(config), config.model.path, detach=detach))


def _deploy(flags: Flags, address: str) -> NoReturn:
    needs = ("redis.url", "security.token", "security.secret")
    config = settled(flags, keys.UP, needs).config
    from cluster.config import assemble
    from cluster.serve import attached

    launch, routers = assemble.launch(config), config.router.replicas
    raise typer.Exit(attached.up(launch, config.model.path, address, routers))


# MERGED cluster.commands.down
# `baton down`.


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
    from cluster.launch.down import down as run
    from protocol.errors import StartupError

    try:
        if address is not None:
            from cluster.serve import attached

            raise typer.Exit(attached.down(address, typer.echo))
        raise typer.Exit(run(config.cluster, config.drain_s, typer.echo))
    except StartupError as e:
        raise failure(e) from None


# MERGED cluster.commands.scale
# `baton scale`.


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
    from cluster.serve import scale as scaling
    from protocol.errors import StartupError

    try:
        wanted = scaling.parse(counts)
        typer.echo(scaling.scale(config.cluster, wanted, address, config.start_deadline_s))
    except StartupError as e:
        raise failure(e) from None
