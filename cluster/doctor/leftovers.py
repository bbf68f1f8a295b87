"""What clusters of this user are there, or have left something behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from cluster.doctor.finding import Finding, note, ok
from cluster.doctor.subject import Wanted
from cluster.local.processes import RUN_DIR_VARIABLE
from cluster.local.run_state import RUN_PREFIX, Home, home_path

_INSIDE = ("launch.json", "redis.log", "ray")  # what tells a run folder from others


class Leftovers(msgspec.Struct, frozen=True):
    """``running``: URL of the cluster when it runs. ``processes``: of a run that is over.
    ``folders``: of runs that nobody works in."""

    running: str | None
    processes: int
    folders: tuple[str, ...]


def running_url(cluster: str) -> str | None:
    """Where the cluster of this name serves, if it runs. Creates nothing."""
    if not home_path(cluster).is_dir():
        return None
    home = Home(cluster)
    state = home.read()
    return state.url if state is not None and home.running() else None


def collect(wanted: Wanted) -> Leftovers:
    running = running_url(wanted.cluster)
    live = _live_run_dirs()
    state = Home(wanted.cluster).read() if home_path(wanted.cluster).is_dir() else None
    stale = state.run_dir if state is not None and running is None else None
    bases = {Path(tempfile.gettempdir()).resolve(), Path("/tmp")}
    folders = [path for base in bases for path in base.glob(f"{RUN_PREFIX}????????")]
    dead = [str(p) for p in folders if str(p) not in live and _mine(p)]
    return Leftovers(running, live.get(stale, 0) if stale else 0, tuple(sorted(set(dead))))


def _live_run_dirs() -> dict[str, int]:
    """Run folders that processes of this user belong to, with their number."""
    marker = f"{RUN_DIR_VARIABLE}=".encode()
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone, or another user's
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(marker):
                    folder = os.fsdecode(variable[len(marker) :])
                    found[folder] = found.get(folder, 0) + 1
    return found


def _mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        mine = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
        return mine and any((path / name).exists() for name in _INSIDE)
    return False


def judge(facts: Leftovers, wanted: Wanted) -> list[Finding]:
    name = wanted.cluster
    findings = []
    if facts.running is not None:
        findings.append(note("leftovers", f"cluster {name!r} runs: {facts.running}"))
    if facts.processes:
        text = f"{facts.processes} processes of a run of {name!r} that is over"
        findings.append(note("leftovers", text, f"`baton down --cluster {name}` ends them"))
    if facts.folders:
        text = f"{len(facts.folders)} folders of runs that are over: {', '.join(facts.folders[:3])}"
        findings.append(note("leftovers", text, f"rm -r {' '.join(facts.folders[:3])}"))
    return findings or [ok("leftovers", "none")]
