"""Connections that every process of a cluster needs: their checks, and how a URL is shown."""

from __future__ import annotations

from urllib.parse import urlsplit

from protocol.errors import StartupError
from protocol.registry.redis_client import check_exposure, check_url
from protocol.security.listen_hosts import check_worker_host
from protocol.security.tls import TlsFiles, check_files


def check_connections(
    process: str, token: str, redis_url: str, tls: TlsFiles | None, host: str
) -> None:
    """Check the cluster token, the Redis URL, and the certificate for listening on ``host``.

    ``process`` names the process in messages, for example "a worker". Raises StartupError."""
    if not token:
        raise StartupError(f"{process} needs the cluster token: set BATON_TOKEN")
    check_worker_host(host, tls=tls is not None)
    if tls is not None:
        check_files(tls, host)
    check_url(redis_url)
    check_exposure(redis_url)


def without_password(url: str) -> str:
    """Return ``url`` as it may be shown: without password and options, since an option may hold a
    password. Text that is not quite a URL is not shown at all."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "(not a URL)"
    # A password that contains / ? or # ends up in the later parts.
    if not parts.scheme or "@" in parts.path + parts.query + parts.fragment:
        return "(not a URL)"
    user = f"{parts.username or ''}:...@" if "@" in parts.netloc else ""
    bracketed = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{user}{bracketed}{f':{port}' if port else ''}{parts.path}"
