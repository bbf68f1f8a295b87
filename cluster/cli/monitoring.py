"""`baton monitoring`: writes a folder that Prometheus and Grafana start with."""

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

from cluster.cli.common import load_config, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags
from cluster.config.schema import Config, SecuritySection
from cluster.dashboards.provision import write_grafana
from cluster.monitoring.files import RuleOptions, make_private_folder, write_prometheus
from cluster.monitoring.prometheus import ScrapeConfig
from protocol.errors import StartupError
from protocol.security.listen_hosts import is_loopback
from protocol.security.tls import TlsFiles

_KEYS = keys.select_keys("cluster", "security.tls", "security.http_tls")


@with_config_flags(_KEYS)
def monitoring(
    flags: CommandFlags,
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
    config = load_config(flags, _KEYS).config
    options = MonitoringOptions(
        urls=tuple(url or ()),
        ca_file=ca_file,
        alertmanagers=tuple(alertmanager or ()),
        interval_s=interval,
        target=slo_target,
        api_key=os.environ.get("BATON_API_KEY") or None,
    )
    try:
        for line in write_monitoring(folder, options, config):
            typer.echo(line)
    except StartupError as e:
        raise report_failure(e) from None


PROMETHEUS = "127.0.0.1:9090"
"""Where Prometheus listens: on loopback, since it authenticates no clients."""

RELOAD = "kill -HUP PID lets Prometheus read this anew; Grafana sees new dashboards itself"

_ENDPOINT = re.compile(r"[A-Za-z0-9._-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


@dataclass(frozen=True)
class MonitoringOptions:
    """Options of the command line. Empty ``urls`` mean the cluster that runs on this machine."""

    urls: tuple[str, ...] = ()
    ca_file: Path | None = None
    alertmanagers: tuple[str, ...] = ()
    interval_s: int = 10
    target: float = 0.99
    api_key: str | None = None


def write_monitoring(folder: Path, options: MonitoringOptions, config: Config) -> Iterator[str]:
    """Write the folder, and yield the lines to print. Raises StartupError."""
    folder = folder.absolute()
    scrape = scrape_config(options, config)
    make_private_folder(folder)
    wrote = write_prometheus(folder, scrape, RuleOptions(options.target), options.api_key)
    wrote += write_grafana(folder, f"http://{PROMETHEUS}", scrape.interval)
    yield from (f"wrote {path}" for path in wrote)
    if options.api_key is None and not all(
        is_loopback(urlsplit(url).hostname or "") for url in scrape.urls
    ):
        yield "\nno BATON_API_KEY is set: a router that wants a key will tell Prometheus nothing"
    at = shlex.quote(str(folder))
    yield f"\nprometheus --config.file={at}/prometheus.yml --storage.tsdb.path={at}/data \\"
    yield f"  --web.listen-address={PROMETHEUS}"
    yield f"grafana server --homepath=/usr/share/grafana --config={at}/grafana/grafana.ini"
    yield f"\nwhere they run already: {RELOAD}"


def scrape_config(options: MonitoringOptions, config: Config) -> ScrapeConfig:
    """Return what Prometheus scrapes, and how. Raises StartupError for unusable options."""
    from cluster.cli.status_client import running_cluster_url

    security = config.security
    tls = _tls_files(security)
    ca = options.ca_file or (None if tls is None else tls.ca)
    same = security.http_tls.cert is not None and security.http_tls.cert == security.tls.cert
    for endpoint in options.alertmanagers:
        if not _ENDPOINT.fullmatch(endpoint):
            raise StartupError(f"--alertmanager must be HOST:PORT, not {endpoint!r}")
    if (key := options.api_key) is not None and not (key.isascii() and key.isprintable()):
        raise StartupError("BATON_API_KEY must be printable ASCII characters")
    return ScrapeConfig(
        urls=tuple(map(_router_url, options.urls)) or (running_cluster_url(config.cluster),),
        router_ca=None if ca is None else _file(ca),
        router_name=security.tls.name if same else None,
        tls=tls,
        interval=f"{options.interval_s}s",
        alertmanagers=options.alertmanagers,
    )


def _tls_files(security: SecuritySection) -> TlsFiles | None:
    own = security.tls
    if own.ca is None or own.cert is None or own.key is None:
        return None
    return TlsFiles(ca=_file(own.ca), cert=_file(own.cert), key=_file(own.key), name=own.name)


def _file(name: str | Path) -> str:
    """Return the absolute path of a file. Raises StartupError if it does not exist."""
    path = Path(name).absolute()
    if not path.is_file():
        raise StartupError(f"there is no file {path}")
    return str(path)


def _router_url(text: str) -> str:
    """Return the URL without a trailing slash. Raises StartupError if it is not a router's."""
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment:
        raise StartupError("--url must be http://HOST:PORT or https://HOST:PORT, with nothing else")
    return f"{parts.scheme}://{parts.netloc}"
