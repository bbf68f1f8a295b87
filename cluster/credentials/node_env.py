"""Writes ``node.env``, the environment of every process of a cluster, to be sourced by sh.

    set -a; . ~/baton/node.env; set +a; ray start ...

Files are named ``~/baton/...``, since home folders may differ between nodes. Baton gets the Redis
of the cluster as one URL, Ray as several variables. Ray keeps the state of its head (GCS) in that
Redis, so that a head may die and come back; it always uses database 0, and its keys begin with a
namespace of the cluster. ``init`` calls this module.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from cluster.serve.replica_kinds import UNLIMITED_RETRIES
from protocol.errors import StartupError, UsageError
from protocol.registry.redis_client import check_exposure, check_url
from protocol.security.listen_hosts import is_loopback

REDIS_FILE_OPTIONS = {
    "ssl_ca_certs": ("redis-ca.pem", "RAY_REDIS_CA_CERT"),
    "ssl_certfile": ("redis-cert.pem", "RAY_REDIS_CLIENT_CERT"),
    "ssl_keyfile": ("redis-key.pem", "RAY_REDIS_CLIENT_KEY"),
}
"""Options of a Redis URL that name files: the file's name on a node, and Ray's variable."""

_PUBLIC_CAS = "/etc/ssl/certs/ca-certificates.crt"  # of Debian and Ubuntu; Ray has no default


class NodeRedis(NamedTuple):
    """The Redis of a cluster. ``url`` is without the options in ``files``, which name files."""

    url: str
    files: dict[str, str]  # option of the URL -> path of the file on this machine
    variables: dict[str, str]  # Ray's variables, without those for ``files``


def parse_node_redis(url: str) -> NodeRedis:
    """Parse a Redis URL. Raises UsageError if other hosts cannot or should not use it."""
    check_url(url)
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "unix" or not host or is_loopback(host):
        raise UsageError(
            "--redis-url must name a Redis that every node reaches, as"
            " redis://:password@10.0.0.9:6379/0: a socket or loopback address reaches only this"
            " machine"
        )
    try:
        check_exposure(url)
    except StartupError as error:
        raise UsageError(f"--redis-url: {error}") from None
    options = parse_qsl(parts.query, keep_blank_values=True)
    files = {name: value for name, value in options if name in REDIS_FILE_OPTIONS}
    kept = [(name, value) for name, value in options if name not in REDIS_FILE_OPTIONS]
    address = f"{f'[{host}]' if ':' in host else host}:{parts.port or 6379}"
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    variables = {"RAY_REDIS_ADDRESS": f"{parts.scheme}://{address}"}
    if parts.scheme == "rediss" and "ssl_ca_certs" not in files:
        variables["RAY_REDIS_CA_CERT"] = _PUBLIC_CAS
    return NodeRedis(
        urlunsplit((parts.scheme, login + address, parts.path, urlencode(kept), "")),
        files,
        # Ray reads these two from the command line only: start commands pass them on.
        {**variables, "RAY_REDIS_USERNAME": user, "RAY_REDIS_PASSWORD": password},
    )


NODE_FOLDER = "~/baton"
"""Path of the shared folder on every node."""

_HEAD = f"""\
# The environment of this cluster's processes. Everything in this file is secret.
# On a node:  set -a; . {NODE_FOLDER}/node.env; set +a
"""

RUN_SCRIPT = f"""\
#!/bin/sh
# Runs a command as this cluster's processes run, with the program that lies beside this file:
#   ray exec cluster.yaml '{NODE_FOLDER}/run baton status'
set -a; . {NODE_FOLDER}/node.env; set +a
PATH=$HOME{NODE_FOLDER[1:]}/src/.venv/bin:$PATH; export PATH
exec "$@"
"""

_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # for so long nodes survive without a head
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # Baton has metrics of its own
    "RAY_worker_niceness": "0",  # 15 by default: engines would yield to all other processes
    "RAY_SERVE_LOG_TO_STDERR": "1",  # otherwise Serve drops the replicas' output
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": str(UNLIMITED_RETRIES),
}


def node_env(redis: NodeRedis, tls_name: str, monitoring_key: str, hub_token: str) -> str:
    """Return the text of node.env, with newly drawn secrets.

    ``hub_token``: of the Hugging Face hub, with which nodes download models; may be empty."""
    baton = {
        "BATON_TOKEN": secrets.token_hex(32),
        "BATON_SECRET": secrets.token_hex(32),
        "BATON_REDIS_URL": None,
        "BATON_TLS_NAME": tls_name,
        "BATON_API_KEY": monitoring_key,  # for `baton status` and Prometheus
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
        # The library of the Hugging Face hub reads it. A token that a node has already stays.
        f"HF_TOKEN={_quoted(hub_token) or '${HF_TOKEN:-}'}",
        "",
        # KubeRay sets a namespace itself, and deletes its keys at the end.
        "RAY_external_storage_namespace=${RAY_external_storage_namespace:-"
        f"baton-{secrets.token_hex(4)}}}",
        *(f"{name}={_quoted(value)}" for name, value in ray.items()),
        *(
            f"{REDIS_FILE_OPTIONS[option][1]}={_path(REDIS_FILE_OPTIONS[option][0])}"
            for option in redis.files
        ),
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """Quote for sh; a value that needs no quotes gets none, so that other programs can read it."""
    return shlex.quote(value) if value else ""


def _path(file: str) -> str:
    """Return the path of a file on a node; both sh and Baton expand the tilde."""
    return f"{NODE_FOLDER}/{file}"


def _url(redis: NodeRedis) -> str:
    """Return the URL with file options by $HOME, since no tilde is expanded within a URL."""
    return shlex.quote(redis.url) + "".join(_options(redis))


def _options(redis: NodeRedis) -> Iterable[str]:
    mark = "&" if "?" in redis.url else "?"
    for option in redis.files:
        yield f'"{mark}{option}=$HOME{NODE_FOLDER[1:]}/{REDIS_FILE_OPTIONS[option][0]}"'
        mark = "&"
