"""``node.env``: what every process of a cluster has in its environment, for sh to source.

    set -a; . ~/baton/node.env; set +a; ray start ...

Files are named by ``~/baton/...``, so that nodes may have homes at different places.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from cluster.serve.replica_kinds import NEVER_GIVE_UP
from protocol.errors import StartupError
from protocol.registry.directory import check_url
from protocol.registry.redis_access import check_exposure
from protocol.security.cluster_token import is_loopback

# MERGED cluster.node_redis
# The Redis of a cluster as its nodes are told of it: Baton by one URL, Ray by several variables.
#
# Ray keeps there what its head knows (GCS fault tolerance), so that a head may die and come back.
# It
# uses database 0 whatever the URL says, and its keys begin with the cluster's own namespace.

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


FOLDER = "~/baton"
"""Where the folder lies on every node."""

_HEAD = f"""\
# What this cluster's processes have in their environment. Everything in here is secret.
# On a node:  set -a; . {FOLDER}/node.env; set +a
"""

RUN = f"""\
#!/bin/sh
# Runs a command as this cluster's processes run, with the program that lies beside this file:
#   ray exec cluster.yaml '{FOLDER}/run baton status'
set -a; . {FOLDER}/node.env; set +a
PATH=$HOME{FOLDER[1:]}/src/.venv/bin:$PATH; export PATH
exec "$@"
"""

_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # nodes outlive a head that is away so long
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # Baton has metrics of its own
    "RAY_worker_niceness": "0",  # 15 by default: engines would yield to everything else
    "RAY_SERVE_LOG_TO_STDERR": "1",  # else Serve takes what replicas say, and drops it
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": str(NEVER_GIVE_UP),
}


def node_env(redis: NodeRedis, tls_name: str, monitoring_key: str) -> str:
    """The file's text, with secrets that are drawn now."""
    baton = {
        "BATON_TOKEN": secrets.token_hex(32),
        "BATON_SECRET": secrets.token_hex(32),
        "BATON_REDIS_URL": None,
        "BATON_TLS_NAME": tls_name,
        "BATON_API_KEY": monitoring_key,  # of `baton status` and Prometheus
    }
    files = {
        "BATON_TLS_CA": "ca.pem",
        "BATON_TLS_CERT": "node.pem",
        "BATON_TLS_KEY": "node.key",
        "BATON_HTTP_TLS_CERT": "node.pem",
        "BATON_HTTP_TLS_KEY": "node.key",
        "BATON_API_KEYS": "api-keys.yaml",
    }
    ray = {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **redis.variables,
        **_RAY,
    }
    lines = [
        _HEAD,
        *(f"{name}={_url(redis) if v is None else _quoted(v)}" for name, v in baton.items()),
        *(f"{name}={_path(file)}" for name, file in files.items()),
        "",
        # KubeRay has one of its own, which it also clears in the end.
        "RAY_external_storage_namespace=${RAY_external_storage_namespace:-"
        f"baton-{secrets.token_hex(4)}}}",
        *(f"{name}={_quoted(value)}" for name, value in ray.items()),
        *(f"{FILES[option][1]}={_path(FILES[option][0])}" for option in redis.files),
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """For sh. What needs no quotes gets none, so that others can read it, too."""
    return shlex.quote(value) if value else ""


def _path(file: str) -> str:
    """Of a file on the node; sh expands the tilde, and so does Baton."""
    return f"{FOLDER}/{file}"


def _url(redis: NodeRedis) -> str:
    """The URL; within it no tilde is expanded."""
    return shlex.quote(redis.url) + "".join(_options(redis))


def _options(redis: NodeRedis) -> Iterable[str]:
    mark = "&" if "?" in redis.url else "?"
    for option in redis.files:
        yield f'"{mark}{option}=$HOME{FOLDER[1:]}/{FILES[option][0]}"'
        mark = "&"
