"""Finds replicas of the cluster that ended without draining, for the supervisor's log.

Ray waits for its processes and does not report their exit status. A replica that crashes or raises
writes why to its own log; one that SIGKILL ends cannot, so the kernel's counter of processes killed
because memory ran out is read, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cluster.local.start_snippets import baton_command
from cluster.serve.bounded_call import call_within
from cluster.serve.replica_kinds import DeadReplica

_VMSTAT = Path("/proc/vmstat")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_DEADLINE_S = 5.0


class ReplicaDeaths:
    """The deaths of one run of ``cluster``. ``read_dead`` returns all replicas that have died
    unexpectedly."""

    def __init__(
        self,
        cluster: str,
        read_dead: Callable[[], list[DeadReplica]],
        vmstat: Path = _VMSTAT,
    ) -> None:
        self._cluster = cluster
        self._read_dead = read_dead
        self._vmstat = vmstat
        self._seen: set[str] = set()
        self._oom_kills = _oom_kills(vmstat)
        self._answers = True

    def new_lines(self) -> dict[int | None, str]:
        """Return a line for each replica that died since the last call, by its pid; none for good
        once Ray does not answer, about which a line without a pid says so."""
        if not self._answers:
            return {}
        try:
            dead = call_within(_DEADLINE_S, "Ray", self._read_dead)
        except Exception as error:  # Ray's errors have no common type
            self._answers = False
            return {None: f"replicas that die are no longer reported: {error}"}
        new = [replica for replica in dead if replica.id not in self._seen]
        self._seen.update(replica.id for replica in new)
        kills = _oom_kills(self._vmstat)
        kernel, self._oom_kills = kills > self._oom_kills, kills
        return {each.pid: death_text(each, self._cluster, kernel_oom=kernel) for each in new}


def death_text(replica: DeadReplica, cluster: str, *, kernel_oom: bool) -> str:
    """Return what is known. ``kernel_oom``: the kernel has killed a process at that time."""
    text = f"{replica.kind} replica, pid {replica.pid}, ended unexpectedly: "
    if replica.out_of_memory:
        return f"{text}Ray killed it because memory ran out"
    if kernel_oom:
        return f"{text}memory ran out, and the system killed at least one process"
    command = baton_command(f"logs {replica.pid}", cluster)
    return f"{text}it was killed by a signal or crashed (`{command}`)"


def _oom_kills(vmstat: Path) -> int:
    """Return the number of processes that the kernel killed because memory ran out; 0: unknown."""
    try:
        found = _OOM_KILLS.search(vmstat.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
