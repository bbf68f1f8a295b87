"""Other numbers of replicas of what runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ray import serve

from cluster.local.run_state import Home
from cluster.local.start_report import Reporter
from cluster.serve import ray_internals, ray_runtime
from cluster.serve.deploy import Say, Telling, acting, reason, replicas, slots
from cluster.serve.replica_kinds import KINDS, Kind, application
from protocol.errors import StartupError
from protocol.roles import ROLES

_POLL_S = 0.1


def set_replicas(counts: dict[Kind, int], deadline_s: float, say: Say) -> dict[Kind, int]:
    """Sets numbers of replicas, waits until they run, and returns those before. The others are not
    touched. Raises StartupError for a kind that is not there, or that an autoscaler sees to, and as
    ``deploy.wait_until_running``."""
    _check(counts)
    before = replicas()
    absent = [kind for kind in counts if kind not in before]
    if absent:
        raise StartupError(
            f"the cluster runs no {absent[0]} replicas that could be scaled; it runs "
            + (", ".join(f"{count} {kind}" for kind, count in before.items()) or "none at all")
        )
    for kind, count in counts.items():
        ray_internals.asking(kind, count, deadline_s)()
    _wait_for(counts, deadline_s, say)
    return {kind: before[kind] for kind in counts}


def _check(kinds: Collection[Kind]) -> None:
    """Raises StartupError for numbers that are an autoscaler's."""
    pools = [kind for kind in ROLES if kind in kinds]
    if pools and acting():
        raise StartupError(
            f"the autoscaler sets the number of {' and '.join(pools)} workers (autoscaler.mode is"
            " act); change its limits, as autoscaler.decode_min, or turn it to advise, and deploy"
            " again; routers=N can be scaled"
        )


def _failing(kinds: Sequence[Kind]) -> list[str]:
    """What replicas that fail to start say of it."""
    applications = serve.status().applications
    found = [applications[name] for name in map(application, kinds) if name in applications]
    return [
        reason(overview)
        for overview in found
        if any("failed to start" in each.message for each in overview.deployments.values())
    ]


def _wait_for(counts: dict[Kind, int], deadline_s: float, say: Say) -> None:
    end = time.monotonic() + deadline_s
    tell = Telling(say, end)
    while True:
        running = replicas()
        waiting: list[Kind] = [kind for kind, n in counts.items() if running.get(kind, 0) != n]
        if not waiting:
            return
        if time.monotonic() > end:
            shown = ", ".join(f"{running.get(k, 0)} of {counts[k]} {k}" for k in waiting)
            why = slots(waiting) + "".join(f"; {reason}" for reason in _failing(waiting))
            raise StartupError(f"after {deadline_s:.0f} s {shown} run{why}")
        tell(waiting)
        time.sleep(_POLL_S)


# MERGED cluster.scale
# `baton scale`: other numbers of replicas, without touching those that stay.

MOST = 10_000
_NAMES: dict[str, Kind] = {"prefill": "prefill", "decode": "decode", "routers": "router"}


def parse(words: Sequence[str]) -> dict[Kind, int]:
    """``["prefill=3", "decode=5"]``. Raises StartupError for anything else."""
    counts: dict[Kind, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        kind = _NAMES.get(name)
        if kind is None or not number.isascii() or not number.isdigit():
            expected = " ".join(f"{each}=N" for each in _NAMES)
            raise StartupError(f"{word!r}: expected one or more of {expected}")
        if kind in counts:
            raise StartupError(f"{name} is given twice")
        if not 1 <= int(number) <= MOST:
            raise StartupError(f"{word!r}: expected a number from 1 to {MOST}")
        counts[kind] = int(number)
    return counts


def scale(cluster: str, counts: dict[Kind, int], address: str | None, deadline_s: float) -> str:
    """Returns when they run, with what was and is. Raises StartupError."""
    with _there(cluster, address), Reporter() as report:
        before = set_replicas(counts, deadline_s, report)
    changes = [f"{kind} {before[kind]} -> {counts[kind]}" for kind in KINDS if kind in counts]
    return ", ".join(changes)


def _there(cluster: str, address: str | None) -> AbstractContextManager[None]:
    if address is not None:
        return ray_runtime.connected(address)
    state = Home(cluster).read()
    if state is None or not state.ready or state.ray_address is None:
        raise StartupError(
            f"no cluster {cluster!r} of this user serves on this machine; one on other hosts is"
            " named by --address"
        )
    ray_runtime.prepare_again(Path(state.run_dir))
    return ray_runtime.connected(state.ray_address)
