"""`baton monitoring`: what Prometheus and Grafana start with."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from cluster.cli.configured import failure, settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.schema import Config, SecuritySection
from cluster.config.settle import Flags
from cluster.dashboards.grafana import write_grafana
from cluster.monitoring.files import Rules, make, write_prometheus
from cluster.monitoring.prometheus import Watched
from protocol.errors import StartupError
from protocol.security.cluster_token import is_loopback
from protocol.security.tls import TlsFiles

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

    from protocol.errors import StartupError

    wanted = Wanted(
        urls=tuple(url or ()),
        ca_file=ca_file,
        alertmanagers=tuple(alertmanager or ()),
        interval_s=interval,
        target=slo_target,
        api_key=os.environ.get("BATON_API_KEY") or None,
    )
    try:
        for line in run(folder, wanted, config):
            typer.echo(line)
    except StartupError as e:
        raise failure(e) from None


# MERGED cluster.monitoring.command
# What `baton monitoring` was asked for, checked, and written.

PROMETHEUS = "127.0.0.1:9090"
"""Where it is to listen: it asks nobody who they are."""

RELOAD = "kill -HUP PID lets Prometheus read this anew; Grafana sees new dashboards itself"

_ENDPOINT = re.compile(r"[A-Za-z0-9._-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


@dataclass(frozen=True)
class Wanted:
    """Of the command line; ``urls`` empty: the cluster that runs here."""

    urls: tuple[str, ...] = ()
    ca_file: Path | None = None
    alertmanagers: tuple[str, ...] = ()
    interval_s: int = 10
    target: float = 0.99
    api_key: str | None = None


def run(folder: Path, wanted: Wanted, config: Config) -> Iterator[str]:
    """Writes everything; what to say of it, by lines. Raises StartupError."""
    folder = folder.absolute()
    made = watched(wanted, config)
    make(folder)
    wrote = write_prometheus(folder, made, Rules(wanted.target), wanted.api_key)
    wrote += write_grafana(folder, f"http://{PROMETHEUS}", made.interval)
    yield from (f"wrote {path}" for path in wrote)
    if wanted.api_key is None and not all(_is_here(url) for url in made.urls):
        yield "\nno BATON_API_KEY is set: a router that wants a key will tell Prometheus nothing"
    at = shlex.quote(str(folder))
    yield f"\nprometheus --config.file={at}/prometheus.yml --storage.tsdb.path={at}/data \\"
    yield f"  --web.listen-address={PROMETHEUS}"
    yield f"grafana server --homepath=/usr/share/grafana --config={at}/grafana/grafana.ini"
    yield f"\nwhere they run already: {RELOAD}"


def watched(wanted: Wanted, config: Config) -> Watched:
    """Raises StartupError for what Prometheus could not use."""
    security = config.security
    tls = _tls(security)
    ca = wanted.ca_file or (None if tls is None else tls.ca)
    same = security.http_tls.cert is not None and security.http_tls.cert == security.tls.cert
    for endpoint in wanted.alertmanagers:
        if not _ENDPOINT.fullmatch(endpoint):
            raise StartupError(f"--alertmanager must be HOST:PORT, not {endpoint!r}")
    if (key := wanted.api_key) is not None and not (key.isascii() and key.isprintable()):
        raise StartupError("BATON_API_KEY must be printable ASCII characters")
    return Watched(
        urls=tuple(map(_url, wanted.urls)) or (_found(config.cluster),),
        router_ca=None if ca is None else _file(ca),
        router_name=security.tls.name if same else None,
        tls=tls,
        interval=f"{wanted.interval_s}s",
        alertmanagers=wanted.alertmanagers,
    )


def _found(cluster: str) -> str:
    from cluster.cli.status_client import find_url

    return find_url(cluster)


def _tls(security: SecuritySection) -> TlsFiles | None:
    own = security.tls
    if own.ca is None or own.cert is None or own.key is None:
        return None
    return TlsFiles(ca=_file(own.ca), cert=_file(own.cert), key=_file(own.key), name=own.name)


def _file(name: str | Path) -> str:
    """As Prometheus can use it from wherever it starts. Raises StartupError if there is none."""
    path = Path(name).absolute()
    if not path.is_file():
        raise StartupError(f"there is no file {path}")
    return str(path)


def _url(text: str) -> str:
    """Raises StartupError for what is no address of a router."""
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment:
        raise StartupError("--url must be http://HOST:PORT or https://HOST:PORT, with nothing else")
    return f"{parts.scheme}://{parts.netloc}"


def _is_here(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")
