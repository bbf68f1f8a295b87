"""Finds what a `baton up` changes in the cluster that runs, kind by kind. Pure; ``update`` uses it.

settings of a kind differ, or the program does --> its replicas are replaced, one by one
only its number differs                        --> replicas are added or removed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.serve.replica_kinds import ALL_KINDS, ReplicaKind
from cluster.settings.launch_settings import LaunchSettings

_NOT_SHOWN = {"redis_url", "token", "secret", "tls", "http_tls", "api_keys", "prometheus_url"}
"""Secrets, and what the environment of the run fixes: ``update`` refuses to change these."""
_OF_LAUNCH = {"model_id", "model_path"}  # replicas get those of the cluster
_SHOWN_SETTINGS = 6


def changed_settings(
    before: LaunchSettings, after: LaunchSettings, gpu_shares: tuple[float, float]
) -> dict[ReplicaKind, list[str]]:
    """Return for each kind whose replicas get other settings what differs, such as ``max_batch 64
    -> 32``. ``gpu_shares``: the share of a GPU that each worker has before and after."""
    changes = {}
    for kind in ALL_KINDS:
        old = _settings_of(kind, before, gpu_shares[0])
        new = _settings_of(kind, after, gpu_shares[1])
        names = [name for name in new if old.get(name) != new[name]]
        found = [
            f"{name} {_value_text(old.get(name))} -> {_value_text(new[name])}" for name in names
        ]
        if found:
            changes[kind] = found
    return changes


def shorten_changes(changes: list[str]) -> str:
    """Return the changes in one clause, the first few of them where there are many."""
    more = len(changes) - _SHOWN_SETTINGS
    shown = ", ".join(changes[:_SHOWN_SETTINGS])
    return f"{shown} and {more} more" if more > 0 else shown


def _settings_of(kind: ReplicaKind, launch: LaunchSettings, gpu_share: float) -> dict[str, Any]:
    """Return by name all that replicas of the kind are told of ``launch``."""
    own: msgspec.Struct
    if kind == "router":
        own = launch.router
    else:
        own = launch.autoscaler if kind == "autoscaler" else launch.workers[kind]
    found = {name: value for name, value in _flat(own).items() if name not in _OF_LAUNCH}
    found |= {"model": launch.model_id, "drain_s": launch.drain_s}
    if kind == "autoscaler":
        return found
    share = {} if kind == "router" else {"share of a GPU": gpu_share}
    return found | share | {"folder of the model": launch.model_path}


def _flat(settings: msgspec.Struct) -> dict[str, Any]:
    """Return the values of nested settings; those of an engine have no prefix."""
    found: dict[str, Any] = {}
    fields: Mapping[str, Any] = msgspec.structs.asdict(settings)
    for name, value in fields.items():
        if name in _NOT_SHOWN:
            continue
        if isinstance(value, msgspec.Struct):
            prefix = "" if name == "engine" else f"{name}."
            found |= {f"{prefix}{own}": each for own, each in _flat(value).items()}
        else:
            found[name] = value
    return found


def _value_text(value: Any) -> str:
    return "default" if value is None else str(value)
