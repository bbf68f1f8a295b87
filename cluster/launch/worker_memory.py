"""Computes the memory that one more replica needs on this machine, for `baton scale`."""

from __future__ import annotations

from pathlib import Path

from cluster.doctor.memory import MemoryFacts, collect, host_bytes, usable_bytes
from cluster.doctor.subject import cluster_subject
from cluster.serve.replica_kinds import ReplicaKind
from cluster.serve.scale_limits import MemoryRoom
from cluster.settings.launch_settings import read_launch


def memory_room(run_dir: Path) -> MemoryRoom | None:
    """Return the free memory of this machine and what each kind of replica needs of it.

    ``run_dir``: folder of the run, with the settings that it was started with. None where these
    settings or the model cannot be read."""
    try:
        launch = read_launch(run_dir / "launch.json")
    except (OSError, ValueError):
        return None
    subject = cluster_subject(launch, launch.model_path, port_moves=True)
    return room_of_facts(collect(subject))


def room_of_facts(facts: MemoryFacts) -> MemoryRoom | None:
    """Return the room for more replicas on a machine with these facts."""
    if facts.error or not facts.engines:
        return None
    each: dict[ReplicaKind, int] = {"router": host_bytes(None)}
    each |= {pool.role: host_bytes(pool.each) for pool in facts.engines}
    for role in ("prefill", "decode"):
        each.setdefault(role, max(each.values()))
    return MemoryRoom(usable_bytes(facts.free), each)
