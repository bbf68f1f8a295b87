"""What belongs to a node of the cluster, and reaches its replicas through its environment.

Secrets and file names never travel through Ray: on one machine the supervisor sets these variables
before Ray starts, on a cluster of hosts whoever runs ``ray start`` does (`baton init` writes them).

    BATON_TOKEN BATON_SECRET BATON_REDIS_URL BATON_API_KEYS
    BATON_TLS_CA BATON_TLS_CERT BATON_TLS_KEY BATON_TLS_NAME BATON_HTTP_TLS_CERT BATON_HTTP_TLS_KEY
    BATON_AUTOSCALER_PROMETHEUS_URL, which may have a password
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from cluster.autoscale.settings import AutoscalerSettings
from cluster.config import assemble, keys
from cluster.config.layers import Flags
from cluster.config.mistakes import ConfigError
from cluster.config.schema import Config
from cluster.config.settle import settle
from cluster.launch import Launch
from cluster.settings import WorkerSettings
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
