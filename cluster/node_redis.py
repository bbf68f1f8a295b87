"""The Redis of a cluster as its nodes are told of it: Baton by one URL, Ray by several variables.

Ray keeps there what its head knows (GCS fault tolerance), so that a head may die and come back. It
uses database 0 whatever the URL says, and its keys begin with the cluster's own namespace.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from protocol.auth import is_loopback
from protocol.directory import check_url
from protocol.errors import StartupError
from protocol.redis_access import check_exposure

FILES = {
    "ssl_ca_certs": ("redis-ca.pem", "RAY_REDIS_CA_CERT"),
    "ssl_certfile": ("redis-cert.pem", "RAY_REDIS_CLIENT_CERT"),
    "ssl_keyfile": ("redis-key.pem", "RAY_REDIS_CLIENT_KEY"),
}
"""Options of a URL that name files: what these are called on a node, and Ray's variables."""

_PUBLIC_CAS = "/etc/ssl/certs/ca-certificates.crt"  # Debian and Ubuntu; Ray knows none by itself


class NodeRedis(NamedTuple):
    """``url`` has, after ``?``, no names of files: those in ``files`` are to follow."""

    url: str
    files: dict[str, str]  # option of the URL -> path of a file, here
    variables: dict[str, str]  # Ray's, but for those of ``files``


def node_redis(url: str) -> NodeRedis:
    """Raises StartupError for a Redis that other hosts cannot or should not use."""
    check_url(url)
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "unix" or not host or is_loopback(host):
        raise StartupError(
            "--redis-url must name a Redis that every node reaches, as"
            " redis://:password@10.0.0.9:6379/0: a socket or loopback is this machine's alone"
        )
    check_exposure(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    files = {name: value for name, value in options if name in FILES}
    kept = [(name, value) for name, value in options if name not in FILES]
    address = f"{f'[{host}]' if ':' in host else host}:{parts.port or 6379}"
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    variables = {"RAY_REDIS_ADDRESS": f"{parts.scheme}://{address}"}
    if parts.scheme == "rediss" and "ssl_ca_certs" not in files:
        variables["RAY_REDIS_CA_CERT"] = _PUBLIC_CAS
    return NodeRedis(
        urlunsplit((parts.scheme, login + address, parts.path, urlencode(kept), "")),
        files,
        # Ray reads these two from the command line alone: start commands pass them on.
        {**variables, "RAY_REDIS_USERNAME": user, "RAY_REDIS_PASSWORD": password},
    )
