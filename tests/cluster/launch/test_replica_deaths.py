"""Lines of the supervisor's log about replicas that ended without draining."""

from __future__ import annotations

from pathlib import Path

from cluster.launch.replica_deaths import ReplicaDeaths
from cluster.serve.replica_kinds import DeadReplica

CRASHED = DeadReplica("a", "decode", 71, out_of_memory=False)
ENDED_BY_RAY = DeadReplica("b", "prefill", 72, out_of_memory=True)
LATER = DeadReplica("c", "router", 73, out_of_memory=False)


def test_each_death_is_reported_once_with_what_is_known(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 12\noom_kill 4\nnuma_hit 1\n")
    dead = [CRASHED, ENDED_BY_RAY]
    deaths = ReplicaDeaths("audit", lambda: dead, vmstat)
    lines = deaths.new_lines()
    assert lines.keys() == {71, 72}
    assert lines[71].startswith(
        "decode replica, pid 71, ended unexpectedly: it was killed by a signal or crashed (`"
    )
    assert lines[71].endswith("baton logs 71 --cluster audit`)")
    assert (
        lines[72]
        == "prefill replica, pid 72, ended unexpectedly: Ray killed it because memory ran out"
    )
    assert deaths.new_lines() == {}
    dead.append(LATER)
    vmstat.write_text("oom_kill 5\n")
    assert deaths.new_lines() == {
        73: "router replica, pid 73, ended unexpectedly: memory ran out, and the system killed at"
        " least one process"
    }


def test_a_ray_that_does_not_answer_is_asked_no_more(tmp_path: Path) -> None:
    calls = []

    def fail() -> list[DeadReplica]:
        calls.append(1)
        raise RuntimeError("no answer")

    deaths = ReplicaDeaths("audit", fail, tmp_path / "no vmstat")
    assert deaths.new_lines() == {None: "replicas that die are no longer reported: no answer"}
    assert deaths.new_lines() == {} and len(calls) == 1
