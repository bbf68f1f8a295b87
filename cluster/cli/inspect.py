"""`baton config`, `baton doctor` and `baton status`: commands that look and change nothing."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cluster.cli.common import load_config, report_failure
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
    """Print the configuration that counts, with where each value is from."""
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
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Look for whatever would keep a cluster from starting, and say what to do about it."""
    config = load_config(flags, keys.UP_KEYS).config
    from cluster.config import assemble
    from cluster.doctor.report import run_doctor
    from cluster.doctor.subject import cluster_subject

    subject = cluster_subject(assemble.launch_settings(config), config.model.path, port_moves=False)
    raise typer.Exit(run_doctor(subject, as_json=json))


_KEYS = keys.select_keys("cluster", "security.tls")


@with_config_flags(_KEYS)
def status(
    flags: CommandFlags,
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
    config = load_config(flags, _KEYS).config
    from cluster.cli import status_client
    from protocol.errors import StartupError
    from router.overview.cluster_scraper import ClusterScraper
    from router.overview.scraper import ScrapeError

    try:
        files = config.security.tls
        tls = status_client.metrics_tls_context(files.ca, files.cert, files.key)
        api_key = os.environ.get("BATON_API_KEY")
        router_url = url or status_client.running_cluster_url(config.cluster)
        scraper = ClusterScraper(router_url, api_key=api_key, tls=tls, name=files.name)
        live = not (once or json)
        exit_status = status_client.show_status(
            scraper, live=live, as_json=json, interval_s=interval
        )
        raise typer.Exit(exit_status)
    except (StartupError, ScrapeError) as e:
        raise report_failure(e) from None
