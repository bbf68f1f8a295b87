"""`baton config`, `baton doctor` and `baton status`: commands that look and change nothing."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cluster.cli.common import CaFile, load_config, parse_router_url, report_failure
from cluster.config import keys, show_config
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags


@with_config_flags(keys.UP_KEYS)
def config(
    flags: CommandFlags,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, for editors.")
    ] = False,
) -> None:
    """Print the effective configuration and the source of each value."""
    if schema:
        typer.echo(show_config.json_schema())
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    text = show_config.render_config(
        load_config(flags, keys.UP_KEYS).values, color=console.is_terminal
    )
    console.print(text, end="")


@with_config_flags(keys.UP_KEYS)
def doctor(
    flags: CommandFlags,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find all problems that would prevent a start, and say how to solve them."""
    resolved = load_config(flags, keys.UP_KEYS)
    from cluster.config import assemble
    from cluster.doctor.report import run_doctor
    from cluster.doctor.subject import cluster_subject

    launch, moves = assemble.launch_settings(resolved.config), resolved.is_default("router.port")
    subject = cluster_subject(launch, resolved.config.model.path, port_moves=moves)
    raise typer.Exit(run_doctor(subject, as_json=json))


_KEYS = keys.select_keys("cluster", "security.tls")


@with_config_flags(_KEYS)
def status(
    flags: CommandFlags,
    url: Annotated[
        str | None,
        typer.Option(help="URL of a router; by default that of the cluster on this machine."),
    ] = None,
    ca_file: CaFile = None,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the status once, as JSON.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            min=0.2, max=60.0, metavar="S", help="Seconds between two updates, 0.2 to 60."
        ),
    ] = 1.0,
) -> None:
    """Show pools, queues, KV use, rates and latencies. The API key is read from BATON_API_KEY."""
    config = load_config(flags, _KEYS).config
    from cluster.cli import status_client
    from protocol.errors import StartupError
    from router.overview.cluster_scraper import ClusterScraper
    from router.overview.scraper import ScrapeError

    try:
        files = config.security.tls
        tls = status_client.metrics_tls_context(files.ca, files.cert, files.key)
        api_key = os.environ.get("BATON_API_KEY")
        ca = str(ca_file) if ca_file else None
        router = (
            status_client.RouterAddress(parse_router_url(url), None)
            if url is not None
            else status_client.running_router(config.cluster)
        )
        trust = status_client.router_tls_context(ca, router.ca, files.ca)
        scraper = ClusterScraper(
            router.url, api_key=api_key, tls=tls, name=files.name, router_tls=trust
        )
        live = not (once or json)
        exit_status = status_client.show_status(
            scraper, live=live, as_json=json, interval_s=interval
        )
        raise typer.Exit(exit_status)
    except (StartupError, ScrapeError) as e:
        raise report_failure(e) from None
