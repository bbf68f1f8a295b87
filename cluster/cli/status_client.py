"""Runs `baton status`: reads a cluster from its router over HTTP, once or live."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cluster.cli.common import print_json
from cluster.cli.status_view import render_overview
from cluster.local.run_state import ClusterHome
from protocol.errors import StartupError
from protocol.security import tls
from protocol.security.tls import TlsFiles
from router.overview.cluster_scraper import ClusterScraper
from router.overview.overview import ClusterOverview, cluster_overview
from router.overview.rates import ScrapeHistory
from router.overview.scraper import ScrapeError, ScrapeResult


def running_cluster_url(cluster: str) -> str:
    """Return the URL of the cluster that runs on this machine. Raises StartupError if none does."""
    home = ClusterHome(cluster)
    state = home.read() if home.running() else None
    if state is None:
        raise StartupError(
            f"no cluster {cluster!r} runs here: start one with `baton up`, name another with"
            " --cluster, or give the address of a router with --url"
        )
    return state.url


def metrics_tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for metrics ports, or None when no file is given.

    Raises StartupError when only some of the files are given."""
    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise StartupError("--tls-ca, --tls-cert and --tls-key go together")
    return tls.mutual_tls_client_context(TlsFiles(ca=ca, cert=cert, key=key))


def show_status(scraper: ClusterScraper, *, live: bool, as_json: bool, interval_s: float) -> int:
    """Print the status, or follow it until Ctrl-C; return the exit status.

    Raises ScrapeError when the router does not answer the first request."""
    console = Console(highlight=False)
    if live and console.is_terminal and not as_json:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow(scraper, console, interval_s))
        return 0
    shown = asyncio.run(_once(scraper))
    if as_json:
        print_json(shown)
    else:
        console.print(render_overview(shown, console), soft_wrap=not console.is_terminal)
    return 0


async def _once(scraper: ClusterScraper) -> ClusterOverview:
    async with scraper:
        return cluster_overview(scraper.url, await scraper.scrape(), None, time.time())


async def _follow(scraper: ClusterScraper, console: Console, interval_s: float) -> None:
    """Redraw the screen until Ctrl-C; keep trying while the router does not answer."""
    past = ScrapeHistory()
    async with scraper:
        shown = _screen(scraper, console, past, await scraper.scrape())
        with Live(shown, console=console, screen=True, auto_refresh=False) as screen:
            while True:
                screen.update(shown, refresh=True)
                await asyncio.sleep(interval_s)
                try:
                    shown = _screen(scraper, console, past, await scraper.scrape())
                except ScrapeError as error:
                    past.clear()
                    shown = Text(f"{error}; waiting for it (Ctrl-C ends)", style="red")


def _screen(
    scraper: ClusterScraper, console: Console, past: ScrapeHistory, seen: ScrapeResult
) -> RenderableType:
    """Return the screen for one scrape, and add the scrape to ``past``."""
    shown = cluster_overview(scraper.url, seen, past.add(seen.snapshot), time.time())
    return Group(render_overview(shown, console), Text("\nCtrl-C ends", style="dim"))
