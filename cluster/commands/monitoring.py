"""`baton monitoring`: what Prometheus and Grafana start with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags

_KEYS = keys.of("cluster", "security.tls", "security.http_tls")


@configured(_KEYS)
def monitoring(
    flags: Flags,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What is written goes there.")],
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="A router; several are possible, any of them tells all processes. By default that"
            " of the cluster that runs here."
        ),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="CA of the routers' HTTPS; by default --tls-ca, without it the system's."
        ),
    ] = None,
    alertmanager: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="Who sends alerts on.")
    ] = None,
    interval: Annotated[
        int, typer.Option(min=1, max=60, help="Seconds between two looks at each process.")
    ] = 10,
    slo_target: Annotated[
        float,
        typer.Option(min=0.5, max=0.99999, help="Share of requests that objectives hold for."),
    ] = 0.99,
) -> None:
    """Write a folder that Prometheus and Grafana start with. BATON_API_KEY goes into it if set."""
    config = settled(flags, _KEYS).config
    from cluster.monitoring import command
    from protocol.errors import StartupError

    wanted = command.Wanted(
        urls=tuple(url or ()),
        ca_file=ca_file,
        alertmanagers=tuple(alertmanager or ()),
        interval_s=interval,
        target=slo_target,
        api_key=os.environ.get("BATON_API_KEY") or None,
    )
    try:
        for line in command.run(folder, wanted, config):
            typer.echo(line)
    except StartupError as e:
        raise failure(e) from None
