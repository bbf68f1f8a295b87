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

from cluster.cli.common import CaFile, load_config, parse_router_url, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags
from cluster.config.schema import Config, SecuritySection
from cluster.dashboards.provision import write_grafana
from cluster.monitoring.files import RuleOptions, make_private_folder, write_prometheus
from cluster.monitoring.prometheus import ScrapeConfig
from protocol.errors import StartupError, UsageError
from protocol.security.listen_hosts import is_loopback
from protocol.security.tls import TlsFiles

_KEYS = keys.select_keys("cluster", "security.tls", "security.http_tls")


@with_config_flags(_KEYS)
def monitoring(
    flags: CommandFlags,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")],
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a router, which lists all processes; may be repeated. By default that of"
            " the cluster on this machine."
        ),
    ] = None,
    ca_file: CaFile = None,
    alertmanager: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="Alertmanager that gets the alerts; may be repeated."
        ),
    ] = None,
    interval: Annotated[
        int, typer.Option(min=1, max=60, help="Seconds between two scrapes of a process.")
    ] = 10,
    slo_target: Annotated[
        float,
        typer.Option(min=0.5, max=0.99999, help="Share of requests that must meet the objectives."),
    ] = 0.99,
) -> None:
    """Write a folder with which Prometheus and Grafana start. It includes BATON_API_KEY, if set."""
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

RELOAD = (
    "`kill -HUP PID` makes Prometheus read the files again; Grafana finds new dashboards by itself"
)

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
        yield "\nBATON_API_KEY is not set: routers that require a key will refuse Prometheus"
    at = shlex.quote(str(folder))
    yield f"\nprometheus --config.file={at}/prometheus.yml --storage.tsdb.path={at}/data \\"
    yield f"  --web.listen-address={PROMETHEUS}"
    yield f"grafana server --homepath=/usr/share/grafana --config={at}/grafana/grafana.ini"
    yield f"\nif they already run: {RELOAD}"


def scrape_config(options: MonitoringOptions, config: Config) -> ScrapeConfig:
    """Return what Prometheus scrapes, and how. Raises StartupError for unusable options."""
    from cluster.cli.status_client import RouterAddress, running_router

    security = config.security
    tls = _tls_files(security)
    same = security.http_tls.cert is not None and security.http_tls.cert == security.tls.cert
    for endpoint in options.alertmanagers:
        if not _ENDPOINT.fullmatch(endpoint):
            raise UsageError(f"--alertmanager must be HOST:PORT, not {endpoint!r}")
    if (key := options.api_key) is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("BATON_API_KEY must be printable ASCII characters")
    routers = [RouterAddress(url, None) for url in map(parse_router_url, options.urls)]
    routers = routers or [running_router(config.cluster)]
    ca = options.ca_file or (tls.ca if tls else None) or routers[0].ca or _system_ca()
    return ScrapeConfig(
        urls=tuple(router.url for router in routers),
        router_ca=None if ca is None else _file(ca),
        router_name=security.tls.name if same else None,
        tls=tls,
        interval=f"{options.interval_s}s",
        alertmanagers=options.alertmanagers,
    )


def _system_ca() -> str | None:
    """Return the file in SSL_CERT_FILE; Prometheus may run without this variable."""
    return os.environ.get("SSL_CERT_FILE") or None


def _tls_files(security: SecuritySection) -> TlsFiles | None:
    own = security.tls
    if own.ca is None or own.cert is None or own.key is None:
        return None
    return TlsFiles(ca=_file(own.ca), cert=_file(own.cert), key=_file(own.key), name=own.name)


def _file(name: str | Path) -> str:
    """Return the absolute path of a file of an option. Raises UsageError if it does not exist."""
    path = Path(name).absolute()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    return str(path)
