"""Runs `baton status`: reads a cluster from its router over HTTP, once or live."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cluster.cli.common import print_json
from cluster.cli.status_view import render_overview
from cluster.local.run_state import ClusterHome, others_text
from protocol.errors import StartupError, UsageError
from protocol.security import tls
from protocol.security.tls import TlsFiles
from router.overview.cluster_scraper import ClusterScraper
from router.overview.overview import ClusterOverview, cluster_overview
from router.overview.rates import ScrapeHistory
from router.overview.scraper import ScrapeError, ScrapeResult


class RouterAddress(NamedTuple):
    """URL of a router, and the file of the CA of its certificate; None: the system's CAs."""

    url: str
    ca: str | None


def running_router(cluster: str) -> RouterAddress:
    """Return the router of the cluster that runs on this machine. Raises StartupError if none
    does."""
    home = ClusterHome(cluster)
    state = home.read() if home.running() else None
    if state is None:
        raise StartupError(
            f"no cluster {cluster!r} runs here{others_text(cluster)}: start one with `baton up`,"
            " name another with --cluster, or give the address of a router with --url"
        )
    return RouterAddress(state.url, state.ca)


def router_tls_context(given: str | None, *others: str | None) -> ssl.SSLContext:
    """Return the TLS context for routers, which trusts the system's CAs (or those in the file that
    SSL_CERT_FILE names) and those in the files. Raises StartupError for unusable files, which is
    a UsageError for ``given``, the file of an option."""
    context = ssl.create_default_context()
    for ca in filter(None, (given, *others)):
        try:
            context.load_verify_locations(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error)
            kind = UsageError if ca == given else StartupError
            raise kind(f"{ca}: not a readable file of CA certificates: {reason}") from None
    return context


def metrics_tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for metrics ports, or None when no file is given.

    Raises StartupError when only some of the files are given."""
    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise UsageError("--tls-ca, --tls-cert and --tls-key go together")
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
                    shown = Text(f"{error}; trying again (Ctrl-C exits)", style="red")


def _screen(
    scraper: ClusterScraper, console: Console, past: ScrapeHistory, seen: ScrapeResult
) -> RenderableType:
    """Return the screen for one scrape, and add the scrape to ``past``."""
    shown = cluster_overview(scraper.url, seen, past.add(seen.snapshot), time.time())
    return Group(render_overview(shown, console), Text("\nCtrl-C exits", style="dim"))
