"""Computes the memory that replicas need on this machine, for `baton scale` and for updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from cluster.doctor.memory import MemoryFacts, collect, host_bytes, usable_bytes
from cluster.doctor.subject import cluster_subject
from cluster.local.start_report import format_size
from cluster.local.start_snippets import baton_command
from cluster.serve.replica_kinds import ReplicaKind
from cluster.serve.scale_limits import MemoryRoom
from cluster.settings.launch_settings import LaunchSettings, read_launch
from protocol.errors import StartupError


def memory_room(run_dir: Path) -> MemoryRoom | None:
    """Return the free memory of this machine and what each kind of replica needs of it.

    ``run_dir``: folder of the run, with the settings that it was started with. None where these
    settings or the model cannot be read."""
    try:
        launch = read_launch(run_dir / "launch.json")
    except (OSError, ValueError):
        return None
    return _room(launch)


def update_room(
    before: LaunchSettings,
    after: LaunchSettings,
    running: Mapping[ReplicaKind, int],
    replaced: Collection[ReplicaKind],
) -> MemoryRoom | None:
    """Return the memory for the replicas of an update: what is free, and what the ``running``
    ones of the ``replaced`` kinds give back. None where the model cannot be read.

    Raises StartupError for invalid sizes, and where the new replica of a kind, which starts before
    the old one stops, does not fit."""
    facts = collect(cluster_subject(after, after.model_path, port_moves=True))
    if facts.error:
        raise StartupError(f"{facts.error}: raise --kv-tokens, or leave it out")
    new, old = room_of_facts(facts), _room(before)
    if new is None or old is None:
        return None
    for kind in replaced:
        need = new.each.get(kind, 0)
        if running.get(kind) and need > new.free:
            raise StartupError(
                f"{kind}: a new replica starts before an old one stops, and needs"
                f" {format_size(need)} of memory, {format_size(new.free)} are free: lower"
                f" --kv-tokens, or stop the cluster (`{baton_command('down', after.cluster)}`) and"
                " start it anew; nothing was changed"
            )
    given_back = sum(running.get(kind, 0) * old.each.get(kind, 0) for kind in replaced)
    return MemoryRoom(new.free + given_back, new.each)


def _room(launch: LaunchSettings) -> MemoryRoom | None:
    return room_of_facts(collect(cluster_subject(launch, launch.model_path, port_moves=True)))


def room_of_facts(facts: MemoryFacts) -> MemoryRoom | None:
    """Return the room for more replicas on a machine with these facts."""
    if facts.error or not facts.engines:
        return None
    each: dict[ReplicaKind, int] = {"router": host_bytes(None)}
    each |= {pool.role: host_bytes(pool.each) for pool in facts.engines}
    for role in ("prefill", "decode"):
        each.setdefault(role, max(each.values()))
    return MemoryRoom(usable_bytes(facts.free), each)
