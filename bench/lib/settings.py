"""Settings for benchmarks and tests: the defaults of the configuration, with changes made in code.

The settings classes of the product have no defaults for keys, because ``cluster.config.schema``
declares each default once. These functions read them from there. They also set the fields that have
no key, which exist for comparisons: ``kv_storage`` and ``kv_codec``.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from engine.ipc.settings import EngineSettings, SpeculationMethod, SpeculationSettings
from protocol.roles import Role
from router.settings import RouterSettings

NO_SPECULATION = SpeculationSettings(method="off", model_path=None, max_tokens=8)


def speculation_settings(
    method: SpeculationMethod, model_path: str | None = None, max_tokens: int = 8
) -> SpeculationSettings:
    return SpeculationSettings(method=method, model_path=model_path, max_tokens=max_tokens)


def engine_settings(model_path: str, role: Role = "decode", **changes: Any) -> EngineSettings:
    """Return the default settings of an engine without speculation."""
    default = assemble.worker_settings(Config(), role).engine
    changes = {"model_path": model_path, "speculation": NO_SPECULATION, **changes}
    return replace(default, **changes)


def worker_settings(role: Role, **changes: Any) -> WorkerSettings:
    """Return the default settings of a worker; ``changes`` name its fields or its engine's."""
    default = assemble.worker_settings(Config(), role)
    of_engine = {k: changes.pop(k) for k in EngineSettings.__struct_fields__ if k in changes}
    return replace(default, engine=replace(default.engine, **of_engine), **changes)


def router_settings(**changes: Any) -> RouterSettings:
    """Return the default settings of a router with ``changes``."""
    return replace(assemble.router_settings(Config()), **changes)


def autoscaler_settings(**changes: Any) -> AutoscalerSettings:
    """Return the default settings of an autoscaler with ``changes``."""
    return replace(assemble.autoscaler_settings(Config()), **changes)
