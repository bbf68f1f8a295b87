"""`baton up`, `baton down` and `baton scale`: commands that start, stop and resize a cluster."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from cluster.cli.common import load_config, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags


@with_config_flags(keys.UP_KEYS)
def up(
    flags: CommandFlags,
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
    config = load_config(flags, keys.UP_KEYS).config
    from cluster.config import assemble
    from cluster.launch.up import up as start_cluster

    raise typer.Exit(
        start_cluster(assemble.launch_settings(config), config.model.path, detach=detach)
    )


def _deploy(flags: CommandFlags, address: str) -> NoReturn:
    needs = ("redis.url", "security.token", "security.secret")
    config = load_config(flags, keys.UP_KEYS, needs).config
    from cluster.config import assemble
    from cluster.launch.prepare_nodes import prepare_nodes
    from cluster.serve.external_cluster import deploy_to_ray

    launch, routers = assemble.launch_settings(config), config.router.replicas
    raise typer.Exit(deploy_to_ray(launch, config.model.path, address, routers, prepare_nodes))


@with_config_flags(keys.DOWN_KEYS)
def down(
    flags: CommandFlags,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Of a Ray cluster to remove Baton from; it stays: auto."),
    ] = None,
) -> None:
    """Stop the cluster that `baton up` started, and whatever a killed one left behind."""
    config = load_config(flags, keys.DOWN_KEYS).config
    from cluster.launch.down import down as stop_cluster
    from protocol.errors import StartupError

    try:
        if address is not None:
            from cluster.serve import external_cluster

            raise typer.Exit(external_cluster.remove_from_ray(address, typer.echo))
        raise typer.Exit(stop_cluster(config.cluster, config.drain_s, typer.echo))
    except StartupError as e:
        raise report_failure(e) from None


@with_config_flags(keys.SCALE_KEYS)
def scale(
    flags: CommandFlags,
    counts: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N routers=N")],
    address: Annotated[
        str | None, typer.Option("--address", help="Of a Ray cluster, from one of its nodes: auto.")
    ] = None,
) -> None:
    """Change how many workers and routers run; those that go finish or hand over their work."""
    config = load_config(flags, keys.SCALE_KEYS).config
    from cluster.serve import scale as scaling
    from protocol.errors import StartupError

    try:
        wanted = scaling.parse_replica_counts(counts)
        typer.echo(scaling.scale_cluster(config.cluster, wanted, address, config.start_deadline_s))
    except StartupError as e:
        raise report_failure(e) from None
