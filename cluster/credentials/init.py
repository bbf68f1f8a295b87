"""Creates the folder that all nodes of a cluster share; called by `baton init` and `baton keys`.

DIR/ca.key ca.pem       the CA. Its key stays here, and signs renewed certificates
DIR/node/               every node's ~/baton
    node.env            secrets, and paths of the files (cluster/credentials/node_env.py)
    run                 runs a command with this environment
    ca.pem node.pem node.key
                        mutual TLS, and HTTPS for clients: one certificate for all nodes
    api-keys.yaml       digests of two API keys: of one tenant, and of monitoring, which cannot
                        generate tokens
    monitoring.key      the API key of monitoring
    baton.yaml          the cluster's configuration, to be edited
    redis-*.pem         files that the URL of Redis names
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.credentials import certificates
from cluster.credentials.certificates import subject_alternative_names
from cluster.credentials.node_env import REDIS_FILE_OPTIONS, RUN_SCRIPT, node_env, parse_node_redis
from protocol.errors import StartupError, UsageError

MONITORING_TENANT = "monitoring"
"""Tenant of the API key that `baton status` and Prometheus use. It cannot generate tokens."""

KEY_SCOPES = ("generate", "monitor", "admin")
"""What an API key may be allowed to do (router/tenants/tenant.py)."""

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


class ClusterFolder(NamedTuple):
    """Result of ``create_cluster_folder``."""

    node: Path  # the folder to copy to every node
    api_key: str  # the tenant's key, which is stored nowhere


def create_cluster_folder(
    folder: Path, hosts: list[str], redis_url: str, tenant: str, name: str, hub_token: str = ""
) -> ClusterFolder:
    """Create the folder with certificates, keys, secrets and a configuration.

    ``hosts`` are the names and addresses by which clients reach the routers, ``name`` is the DNS
    name that all processes prove to each other. With ``hub_token`` nodes download models from the
    Hugging Face hub; it may be empty. Raises StartupError before anything is written, except for
    errors of the disk."""
    redis = parse_node_redis(redis_url)
    if tenant == MONITORING_TENANT:
        raise UsageError(f"--tenant must not be {MONITORING_TENANT!r}: that tenant is reserved")
    contents = {
        REDIS_FILE_OPTIONS[option][0]: _read(option, path) for option, path in redis.files.items()
    }
    key, monitoring_key = draw_api_key(), draw_api_key()
    _check_folder_is_free(folder)
    subject_alternative_names(hosts, name)  # raises for invalid names
    node = folder / "node"
    try:
        node.mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
        ca, _, cert, cert_key = certificates.create_ca(folder, hosts, name)
        cert.replace(node / "node.pem")
        cert_key.replace(node / "node.key")
        contents["ca.pem"] = ca.read_bytes()
        monitoring_line = api_key_line(monitoring_key, MONITORING_TENANT, ["monitor"])
        lines = [api_key_line(key, tenant), monitoring_line]
        contents["api-keys.yaml"] = "".join(f"{line}\n" for line in lines).encode()
        contents["monitoring.key"] = monitoring_key.encode()
        contents["node.env"] = node_env(redis, name, monitoring_key, hub_token).encode()
        contents["baton.yaml"] = _CONFIG.encode()
        for file, content in contents.items():
            _write(node / file, content)
        _write(node / "run", RUN_SCRIPT.encode(), 0o700)
        for path in (ca, node / "node.pem"):
            path.chmod(0o600)
    except OSError as error:
        raise StartupError(f"cannot write to {folder}: {error.strerror}") from None
    return ClusterFolder(node, key)


def draw_api_key() -> str:
    """Draw a random API key."""
    return f"sk-{secrets.token_urlsafe(32)}"


def api_key_line(key: str, tenant: str, scopes: Sequence[str] = ()) -> str:
    """Return the key's line in a file of API keys, which contains its SHA-256 digest only.

    Routers read such files (router/tenants/key_file.py). Without ``scopes`` the key may generate
    tokens, and nothing else."""
    entry = {"tenant": tenant, "scopes": [*scopes]} if scopes else tenant
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}: {json.dumps(entry)}"


def _check_folder_is_free(folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StartupError(f"{folder} exists already: expected a new or an empty folder")
    except OSError as error:
        raise StartupError(f"cannot read {folder}: {error.strerror}") from None


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--redis-url: {option}: cannot read {path}: {reason}") from None


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
