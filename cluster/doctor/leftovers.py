"""Checks for running clusters of this user, and for what earlier runs left behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from cluster.doctor.finding import Finding, note, ok
from cluster.doctor.subject import DoctorSubject
from cluster.local.processes import RUN_DIR_VARIABLE
from cluster.local.run_state import RUN_PREFIX, ClusterHome, cluster_home_path

_RUN_DIR_FILES = ("launch.json", "redis.log", "ray")  # files that only run folders contain


class LeftoverFacts(msgspec.Struct, frozen=True):
    """``running`` is the URL of the cluster if it runs, ``processes`` the number of processes of a
    finished run, and ``folders`` are run folders without processes."""

    running: str | None
    processes: int
    folders: tuple[str, ...]


def running_url(cluster: str) -> str | None:
    """Return the URL of the cluster if it runs. Creates no state folder."""
    if not cluster_home_path(cluster).is_dir():
        return None
    home = ClusterHome(cluster)
    state = home.read()
    return state.url if state is not None and home.running() else None


def collect(subject: DoctorSubject) -> LeftoverFacts:
    running = running_url(subject.cluster)
    live = _live_run_dirs()
    state = (
        ClusterHome(subject.cluster).read() if cluster_home_path(subject.cluster).is_dir() else None
    )
    stale = state.run_dir if state is not None and running is None else None
    bases = {Path(tempfile.gettempdir()).resolve(), Path("/tmp")}
    folders = [path for base in bases for path in base.glob(f"{RUN_PREFIX}????????")]
    dead = [str(p) for p in folders if str(p) not in live and _is_own_run_dir(p)]
    return LeftoverFacts(running, live.get(stale, 0) if stale else 0, tuple(sorted(set(dead))))


def _live_run_dirs() -> dict[str, int]:
    """Return the number of this user's processes by run folder."""
    marker = f"{RUN_DIR_VARIABLE}=".encode()
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended, or another user's
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(marker):
                    folder = os.fsdecode(variable[len(marker) :])
                    found[folder] = found.get(folder, 0) + 1
    return found


def _is_own_run_dir(path: Path) -> bool:
    with contextlib.suppress(OSError):
        mine = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
        return mine and any((path / name).exists() for name in _RUN_DIR_FILES)
    return False


def judge(facts: LeftoverFacts, subject: DoctorSubject) -> list[Finding]:
    name = subject.cluster
    findings = []
    if facts.running is not None:
        findings.append(note("leftovers", f"cluster {name!r} runs: {facts.running}"))
    if facts.processes:
        text = f"{facts.processes} processes of an ended run of {name!r}"
        findings.append(note("leftovers", text, f"`baton down --cluster {name}` ends them"))
    if facts.folders:
        count = len(facts.folders)
        what = "1 folder of an ended run" if count == 1 else f"{count} folders of ended runs"
        text = f"{what}: {', '.join(facts.folders[:3])}"
        findings.append(note("leftovers", text, f"rm -r {' '.join(facts.folders[:3])}"))
    return findings or [ok("leftovers", "none")]
