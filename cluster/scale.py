"""`baton scale`: other numbers of replicas, without touching those that stay."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from cluster import ray_runtime
from cluster.kinds import KINDS, Kind
from cluster.report import Reporter
from cluster.state import Home
from protocol.errors import StartupError

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
        from cluster import rescale

        before = rescale.set_replicas(counts, deadline_s, report)
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
