"""`baton config`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cluster.cli.configured import failure, settled
from cluster.config import keys, show
from cluster.config.flags import configured
from cluster.config.settle import Flags


@configured(keys.UP)
def config(
    flags: Flags,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, for editors.")
    ] = False,
) -> None:
    """Print the configuration that counts, with where each value is from."""
    if schema:
        typer.echo(show.schema())
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    text = show.render(settled(flags, keys.UP).values, color=console.is_terminal)
    console.print(text, end="")


# MERGED cluster.commands.doctor
# `baton doctor`.


@configured(keys.UP)
def doctor(
    flags: Flags,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Look for whatever would keep a cluster from starting, and say what to do about it."""
    config = settled(flags, keys.UP).config
    from cluster.config import assemble
    from cluster.doctor.report import run
    from cluster.doctor.subject import of_launch

    wanted = of_launch(assemble.launch(config), config.model.path, port_moves=False)
    raise typer.Exit(run(wanted, as_json=json))


# MERGED cluster.commands.status
# `baton status`.

_KEYS = keys.of("cluster", "security.tls")


@configured(_KEYS)
def status(
    flags: Flags,
    url: Annotated[
        str | None, typer.Option(help="A router, instead of the cluster that runs here.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")
    ] = 1.0,
) -> None:
    """Show pools, queues, KV use, rates and latencies. BATON_API_KEY goes to the router if set."""
    config = settled(flags, _KEYS).config
    from cluster.cli import status_client as run
    from protocol.errors import StartupError
    from router.overview.metrics_pages import NoAnswer
    from router.overview.watcher import Watcher

    try:
        files = config.security.tls
        tls = run.client_context(files.ca, files.cert, files.key)
        api_key = os.environ.get("BATON_API_KEY")
        where = url or run.find_url(config.cluster)
        watcher = Watcher(where, api_key=api_key, tls=tls, name=files.name)
        live = not (once or json)
        raise typer.Exit(run.status(watcher, live=live, as_json=json, interval_s=interval))
    except (StartupError, NoAnswer) as e:
        raise failure(e) from None
