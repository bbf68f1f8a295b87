"""Adds to a replica's settings what belongs to its node: secrets, certificates, the address.

Secrets and file names never travel through Ray. They reach replicas by the environment of the Ray
node: on one machine the supervisor sets it before it starts Ray; on a cluster of hosts it is set
for ``ray start`` (`baton init` writes the file node.env).

    BATON_TOKEN BATON_SECRET BATON_REDIS_URL BATON_API_KEYS
    BATON_TLS_CA BATON_TLS_CERT BATON_TLS_KEY BATON_TLS_NAME BATON_HTTP_TLS_CERT BATON_HTTP_TLS_KEY
    BATON_AUTOSCALER_PROMETHEUS_URL, which may contain a password
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cluster.config import assemble, keys
from cluster.config.mistakes import ConfigError
from cluster.config.resolve import CommandFlags, resolve_config
from cluster.config.schema import Config
from cluster.local.start_report import StageNote, StartEventWriter
from cluster.serve import ray_runtime
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import LaunchSettings
from cluster.settings.worker_settings import WorkerSettings
from protocol.errors import StartupError
from router.settings import RouterSettings

PACKAGES = (
    *("protocol", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router", "cluster"),
)


Settings = TypeVar("Settings", bound=msgspec.Struct)


class ReplicaContext(msgspec.Struct, frozen=True):
    """What every replica is told about its deployment; part of the replica's version.

    ``events_path``: file for progress on one machine. None on a cluster of hosts, where replicas
    listen on their node's address and report to Ray's logs. ``program``: fingerprint of the
    program that deployed the replicas, so that an update replaces those with another one."""

    events_path: str | None
    drain_s: float
    program: str

    def check_program(self) -> None:
        """Raise StartupError on a node with another program.

        A replica there would run under the deployed version, and no update would replace it."""
        if program_fingerprint() != self.program:
            raise StartupError(
                f"the node {ray_runtime.node_address()} has another version of Baton than the"
                " head: copy the same version to all nodes, and deploy again"
            )

    def listen_address(self) -> str | None:
        """Return the address to listen on; None: the configured one."""
        return None if self.events_path is not None else ray_runtime.node_address()

    def report(self, source: str, text: str) -> None:
        line = text if text.startswith(source) else f"{source}: {text}"
        if self.events_path is None:
            print(line, flush=True)
        else:
            with contextlib.suppress(OSError):  # a replica also starts where the disk is full
                StartEventWriter(Path(self.events_path))(StageNote(line))


def program_fingerprint(packages: tuple[str, ...] = PACKAGES) -> str:
    """Return a hash over all Python files of ``packages``, by name and content; takes 20 ms."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def node_environment(
    launch: LaunchSettings, redis_url: str, token: str, secret: str
) -> dict[str, str]:
    """Return the variables for a cluster on this machine; missing values are empty."""
    tls, https = launch.router.tls, launch.router.http_tls
    values = {
        "redis.url": redis_url,
        "security.token": token,
        "security.secret": secret,
        "security.api_keys": launch.router.api_keys,
        "autoscaler.prometheus_url": launch.autoscaler.prometheus_url,
        **{f"security.tls.{name}": getattr(tls, name, None) for name in _fields("tls")},
        **{f"security.http_tls.{name}": getattr(https, name, None) for name in _fields("http_tls")},
    }
    variables = {key.name: key.variable for key in keys.NODE_KEYS}
    return {variables[name]: value or "" for name, value in values.items() if name in variables}


def _fields(section: str) -> list[str]:
    return [key.path[-1] for key in keys.NODE_KEYS if key.path[:2] == ("security", section)]


def node_config(environ: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in this node's environment, with defaults for all other keys.

    Raises StartupError with everything that is missing or wrong."""
    needs = ("redis.url", "security.token", "security.secret")
    try:
        return resolve_config(CommandFlags(), environ, keys.NODE_KEYS, needs).config
    except ConfigError as error:
        raise StartupError(f"the environment of this node: {error}") from None


def worker_settings_here(
    settings: WorkerSettings, node: Config, address: str | None
) -> WorkerSettings:
    """Return ``settings`` completed from ``node``. ``address``: where to listen, if not as set."""
    own = assemble.worker_settings(node, settings.role)
    host = address or settings.host
    return _with_fields(settings, own, "redis_url", "token", "tls", host=host)


def router_settings_here(
    settings: RouterSettings, node: Config, address: str | None
) -> RouterSettings:
    """Return ``settings`` completed from ``node``, as ``worker_settings_here`` does."""
    own, host = assemble.router_settings(node), address or settings.metrics_host
    fields = ("redis_url", "token", "secret", "tls", "http_tls", "api_keys")
    return _with_fields(settings, own, *fields, metrics_host=host)


def autoscaler_settings_here(
    settings: AutoscalerSettings, node: Config, address: str | None
) -> AutoscalerSettings:
    """Return ``settings`` completed from ``node``, as ``worker_settings_here`` does."""
    own, host = assemble.autoscaler_settings(node), address or settings.metrics_host
    url = own.prometheus_url or settings.prometheus_url
    fields = ("redis_url", "token", "tls")
    return _with_fields(settings, own, *fields, prometheus_url=url, metrics_host=host)


def _with_fields(settings: Settings, own: Settings, *fields: str, **changes: Any) -> Settings:
    """Return ``settings`` with ``fields`` from ``own``, and with ``changes``."""
    return msgspec.structs.replace(settings, **{f: getattr(own, f) for f in fields}, **changes)
