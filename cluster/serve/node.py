"""What belongs to a node of the cluster, and reaches its replicas through its environment.

Secrets and file names never travel through Ray: on one machine the supervisor sets these variables
before Ray starts, on a cluster of hosts whoever runs ``ray start`` does (`baton init` writes them).

    BATON_TOKEN BATON_SECRET BATON_REDIS_URL BATON_API_KEYS
    BATON_TLS_CA BATON_TLS_CERT BATON_TLS_KEY BATON_TLS_NAME BATON_HTTP_TLS_CERT BATON_HTTP_TLS_KEY
    BATON_AUTOSCALER_PROMETHEUS_URL, which may have a password
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cluster.config import assemble, keys
from cluster.config.mistakes import ConfigError
from cluster.config.schema import Config
from cluster.config.settle import Flags, settle
from cluster.local import start_report
from cluster.serve import ray_runtime
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import Launch
from cluster.settings.worker_settings import WorkerSettings
from protocol.errors import StartupError
from router.settings import RouterSettings


def environment(launch: Launch, redis_url: str, token: str, secret: str) -> dict[str, str]:
    """The variables of a cluster on this machine; what it does not have is empty."""
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
    variables = {key.name: key.variable for key in keys.NODE}
    return {variables[name]: value or "" for name, value in values.items() if name in variables}


def _fields(section: str) -> list[str]:
    return [key.path[-1] for key in keys.NODE if key.path[:2] == ("security", section)]


def here(environ: Mapping[str, str] = os.environ) -> Config:
    """What this node's environment says; everything else in it is a default.

    Raises StartupError with all that is missing or wrong."""
    needs = ("redis.url", "security.token", "security.secret")
    try:
        return settle(Flags(), environ, keys.NODE, needs).config
    except ConfigError as error:
        raise StartupError(f"the environment of this node: {error}") from None


def worker(settings: WorkerSettings, node: Config, address: str | None) -> WorkerSettings:
    """``settings`` with what is this node's. ``address``: where to listen; None: as they say."""
    own = assemble.worker(node, settings.role)
    return msgspec.structs.replace(
        settings,
        redis_url=own.redis_url,
        token=own.token,
        tls=own.tls,
        host=address or settings.host,
    )


def router(settings: RouterSettings, node: Config, address: str | None) -> RouterSettings:
    """Likewise."""
    own = assemble.router(node)
    return msgspec.structs.replace(
        settings,
        redis_url=own.redis_url,
        token=own.token,
        secret=own.secret,
        tls=own.tls,
        http_tls=own.http_tls,
        api_keys=own.api_keys,
        metrics_host=address or settings.metrics_host,
    )


def autoscaler(
    settings: AutoscalerSettings, node: Config, address: str | None
) -> AutoscalerSettings:
    """Likewise."""
    own = assemble.autoscaler(node)
    return msgspec.structs.replace(
        settings,
        redis_url=own.redis_url,
        token=own.token,
        tls=own.tls,
        prometheus_url=own.prometheus_url or settings.prometheus_url,
        metrics_host=address or settings.metrics_host,
    )


# MERGED cluster.program
# Which program this is: a hash of its source, so that an update replaces what runs another one.

PACKAGES = (
    *("protocol", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router", "cluster"),
)


def fingerprint(packages: tuple[str, ...] = PACKAGES) -> str:
    """Of all Python files of ``packages``, by names and contents; takes some 20 ms."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# MERGED cluster.place
# Where replicas are, as it is told to each of them.


class Place(msgspec.Struct, frozen=True):
    """Where replicas are. ``events_path``: where they say what they do, on this machine; None: on
    hosts of a cluster, where they listen on their node's address and say it in Ray's logs.
    ``program``: the fingerprint of the one that deployed them."""

    events_path: str | None
    drain_s: float
    program: str

    def check(self) -> None:
        """Raises StartupError on a node with another program: it would run under this one's
        version, and no update would find it."""
        if fingerprint() != self.program:
            raise StartupError(
                f"the node {ray_runtime.node_address()} has another version of Baton than the one"
                " that deploys: bring the same to all nodes, and deploy again"
            )

    def address(self) -> str | None:
        """To listen on; None: as configured."""
        return None if self.events_path is not None else ray_runtime.node_address()

    def say(self, who: str, text: str) -> None:
        line = text if text.startswith(who) else f"{who}: {text}"
        if self.events_path is None:
            print(line, flush=True)
        else:
            start_report.Writer(Path(self.events_path))(start_report.Note(line))
