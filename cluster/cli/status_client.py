"""`baton status`: what a running cluster does, once or live. Asks the router over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cluster.cli.status_view import render
from cluster.local.run_state import Home
from protocol.errors import StartupError
from protocol.security import tls
from protocol.security.tls import TlsFiles
from router.overview.metrics_pages import NoAnswer, Seen
from router.overview.overview import Overview, overview
from router.overview.rates import Past
from router.overview.watcher import Watcher


def find_url(cluster: str) -> str:
    """Where the cluster of this name serves. Raises StartupError when none runs here."""
    home = Home(cluster)
    state = home.read() if home.running() else None
    if state is None:
        raise StartupError(
            f"no cluster {cluster!r} runs here: start one with `baton up`, name another with"
            " --cluster, or give the address of a router with --url"
        )
    return state.url


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """For metrics ports behind mutual TLS; None where no file is given. Raises StartupError."""
    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise StartupError("--tls-ca, --tls-cert and --tls-key go together")
    return tls.client_context(TlsFiles(ca=ca, cert=cert, key=key))


def status(watcher: Watcher, *, live: bool, as_json: bool, interval_s: float) -> int:
    """Exit status. Raises NoAnswer when the router cannot be asked at the first look."""
    console = Console(highlight=False)
    if live and console.is_terminal and not as_json:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow(watcher, console, interval_s))
        return 0
    shown = asyncio.run(_once(watcher))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        console.print(render(shown, console), soft_wrap=not console.is_terminal)
    return 0


async def _once(watcher: Watcher) -> Overview:
    async with watcher:
        return overview(watcher.url, await watcher.look(), None, time.time())


async def _follow(watcher: Watcher, console: Console, interval_s: float) -> None:
    """Until Ctrl-C. A router that goes away is waited for."""
    past = Past()
    async with watcher:
        shown = _screen(watcher, console, past, await watcher.look())
        with Live(shown, console=console, screen=True, auto_refresh=False) as screen:
            while True:
                screen.update(shown, refresh=True)
                await asyncio.sleep(interval_s)
                try:
                    shown = _screen(watcher, console, past, await watcher.look())
                except NoAnswer as error:
                    past.clear()
                    shown = Text(f"{error}; waiting for it (Ctrl-C ends)", style="red")


def _screen(watcher: Watcher, console: Console, past: Past, seen: Seen) -> RenderableType:
    """What is shown of this look; ``past`` holds the looks of the window, and takes this one."""
    shown = overview(watcher.url, seen, past.take(seen.moment), time.time())
    return Group(render(shown, console), Text("\nCtrl-C ends", style="dim"))
