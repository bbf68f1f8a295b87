"""`baton status`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags

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
    from cluster import status as run
    from protocol.errors import StartupError
    from router.overview.fetch import Watcher
    from router.overview.pages import NoAnswer

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
