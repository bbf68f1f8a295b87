"""Makes what the nodes of a cluster share, before there are any.

DIR/ca.key ca.pem       the CA. Its key stays here: it signs the certificates that come
DIR/node/               every node's ~/baton
    node.env            secrets, and where the files are (cluster/credentials/node_env.py)
    run                 runs a command with those
    ca.pem node.pem node.key
                        mutual TLS, and HTTPS for clients: one certificate for all nodes
    api-keys.yaml       digests of the keys of one tenant, and of those who watch
    monitoring.key      the key of those who watch
    baton.yaml          the cluster's configuration, to be edited
    redis-*.pem         where the URL of Redis names files
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from cluster.credentials import certificates
from cluster.credentials.certificates import names_of
from cluster.credentials.node_env import FILES, RUN, node_env, node_redis
from protocol.errors import StartupError

# MERGED cluster.api_keys
# API keys: drawn here, known to a router by their digests (router/common/tenants.py).


def draw() -> str:
    """A new key; its owner alone should have it."""
    return f"sk-{secrets.token_urlsafe(32)}"


def line(key: str, tenant: str) -> str:
    """The line that a file of keys has for it."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}: {json.dumps(tenant)}"


MONITORING = "monitoring"
"""Tenant of the key that `baton status` and Prometheus have."""

_CONFIG = """\
# The cluster, for `baton up --address auto --config ~/baton/baton.yaml`. Every key there is:
# `baton config --schema`. Hosts, certificates and secrets are not here, but in node.env.
model:
  path: null  # folder on every node, or hub id; null: the demo model

pools:
  prefill: {workers: 1}
  decode: {workers: 1}

router:
  port: 8000
  ttft_slo_ms: 2000
  tpot_slo_ms: 100
"""


class Made(NamedTuple):
    node: Path  # the folder that travels
    api_key: str  # the tenant's; kept nowhere


def init(folder: Path, hosts: list[str], redis_url: str, tenant: str, name: str) -> Made:
    """``hosts``: names and addresses that clients reach routers by; ``name``: what all processes
    prove to each other. Raises StartupError; then nothing was made, unless the disk is at fault."""
    redis = node_redis(redis_url)
    if tenant == MONITORING:
        raise StartupError(f"--tenant must not be {MONITORING!r}: that is the one who watches")
    taken = {FILES[option][0]: _read(option, path) for option, path in redis.files.items()}
    key, watching = draw(), draw()
    _refuse_what_is_there(folder)
    names_of(hosts, name)  # or it raises
    node = folder / "node"
    try:
        node.mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
        ca, _, cert, cert_key = certificates.init(folder, hosts, name)
        cert.replace(node / "node.pem")
        cert_key.replace(node / "node.key")
        taken["ca.pem"] = ca.read_bytes()
        lines = [line(key, tenant), line(watching, MONITORING)]
        taken["api-keys.yaml"] = "".join(f"{line}\n" for line in lines).encode()
        taken["monitoring.key"] = watching.encode()
        taken["node.env"] = node_env(redis, name, watching).encode()
        taken["baton.yaml"] = _CONFIG.encode()
        for file, content in taken.items():
            _write(node / file, content)
        _write(node / "run", RUN.encode(), 0o700)
        for path in (ca, node / "node.pem"):
            path.chmod(0o600)
    except OSError as error:
        raise StartupError(f"cannot write to {folder}: {error.strerror}") from None
    return Made(node, key)


def _refuse_what_is_there(folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StartupError(
                f"{folder} is there already: expected a name that is free, or an empty folder"
            )
    except OSError as error:
        raise StartupError(f"cannot look into {folder}: {error.strerror}") from None


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartupError(f"--redis-url: {option}: cannot read {path}: {reason}") from None


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
