"""`baton up`, `baton down` and `baton scale`: commands that start, stop and resize a cluster."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer

from cluster.cli.common import load_config, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags

if TYPE_CHECKING:
    from cluster.config.schema import Config
    from cluster.serve.scale import Confirm
    from cluster.settings.launch_settings import LaunchSettings

Yes: TypeAlias = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask before a running pool more than doubles.")
]


@with_config_flags(keys.UP_KEYS)
def up(
    flags: CommandFlags,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return as soon as the cluster serves.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Deploy on this Ray cluster; `auto` on one of its nodes."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Start a cluster on this machine: workers, router, Redis, Ray; or deploy, or update, on a Ray
    cluster that runs."""
    confirm = partial(_confirm_jumps, yes=yes)
    if address is not None:
        _deploy(flags, address, confirm)
    resolved = load_config(flags, keys.UP_KEYS)
    settings, moves = _launch_settings(resolved.config), resolved.is_default("router.port")
    from cluster.launch.up import up as start_cluster

    model = resolved.config.model.path
    raise typer.Exit(start_cluster(settings, model, confirm, detach=detach, port_moves=moves))


def _deploy(flags: CommandFlags, address: str, confirm: Confirm) -> NoReturn:
    needs = ("redis.url", "security.token", "security.secret")
    config = load_config(flags, keys.UP_KEYS, needs).config
    launch, routers = _launch_settings(config), config.router.replicas
    from cluster.launch.prepare_nodes import prepare_nodes
    from cluster.serve.external_cluster import deploy_to_ray

    model = config.model.path
    raise typer.Exit(deploy_to_ray(launch, model, address, routers, prepare_nodes, confirm))


def _launch_settings(config: Config) -> LaunchSettings:
    """Return the settings of a start; exit with status 2 for a GPU that only Ray may choose."""
    from cluster.config import assemble
    from protocol.errors import UsageError

    launch = assemble.launch_settings(config)
    try:
        launch.check_device()
    except UsageError as e:
        raise report_failure(e) from None
    return launch


@with_config_flags(keys.DOWN_KEYS)
def down(
    flags: CommandFlags,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Remove Baton from this Ray cluster, which keeps running;"
            " `auto` on one of its nodes.",
        ),
    ] = None,
) -> None:
    """Drain and stop the cluster, and remove what a killed one left behind."""
    config = load_config(flags, keys.DOWN_KEYS, tolerant=True).config
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
        str | None,
        typer.Option("--address", help="Scale on this Ray cluster; `auto` on one of its nodes."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Change the number of workers and routers. Those that stop finish or hand over their work."""
    config = load_config(flags, keys.SCALE_KEYS).config
    from cluster.launch.worker_memory import memory_room
    from cluster.serve import scale as scaling
    from protocol.errors import StartupError

    try:
        wanted = scaling.parse_replica_counts(counts)
        confirm = partial(_confirm_jumps, yes=yes)
        deadline_s = config.start_deadline_s
        typer.echo(
            scaling.scale_cluster(config.cluster, wanted, address, deadline_s, memory_room, confirm)
        )
    except StartupError as e:
        raise report_failure(e) from None


def _confirm_jumps(change: str, *, yes: bool) -> bool:
    """Ask whether large changes of counts are wanted. Raises UsageError without a terminal."""
    from protocol.errors import UsageError

    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(f"{change} is a large change: give --yes to confirm it")
    return typer.confirm(f"{change}: continue?")
