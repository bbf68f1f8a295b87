"""Finds the logs of a run, and keeps them when the folder of the run is removed.

    prefill-PID.log ...     what a replica of this kind wrote; its front's line says how its engine
                            ended: signal, out of memory, error
    controller-PID.log      what Ray Serve says of replicas that fail to start
    decisions.jsonl         the autoscaler's decisions
    redis.log               output of the embedded Redis

Kept are those of the last run, at most MAX_FILES files with their last MAX_BYTES. The guardian runs
this file as a script, so it needs only the standard library:

    python -I -S kept_logs.py RUN_DIR FOLDER
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

MAX_FILES = 64
MAX_BYTES = 1 << 20
_HEAD_BYTES = 4096
_ACTOR = re.compile(rb":actor_name:(?:ServeReplica:baton-(\w+)|Serve(Controller))")
_HEADERS = (b":job_id:", b":actor_name:")
_FIXED = ("redis.log", "decisions.jsonl")


def find_logs(run_dir: Path) -> dict[str, Path]:
    """Return the logs of a run by name, the oldest first."""
    found = {name: run_dir / name for name in _FIXED if (run_dir / name).is_file()}
    for logs in run_dir.glob("ray/session_2*/logs"):
        found |= find_replica_logs(logs)
    return found


def find_replica_logs(folder: Path) -> dict[str, Path]:
    """Return the logs of replicas in a folder of Ray by name, the oldest first."""
    found = {}
    written = [*folder.glob("worker-*.out"), *folder.glob("worker-*.err")]
    for path in sorted(written, key=_changed_at):
        if (kind := _replica_kind(path)) is not None:
            pid, own = path.stem.rpartition("-")[2], path.suffix == ".out"
            found[f"{kind}-{pid}{'.out' if own else ''}.log"] = path
    return found


def _changed_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _replica_kind(path: Path) -> str | None:
    """Return the kind of the replica whose file it is, in small letters; None for other processes,
    and for a standard output without a line."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return None
    found = _ACTOR.search(head)
    if found is None or (path.suffix == ".out" and not without_headers(head)):
        return None
    return (found[1] or found[2]).decode().lower()


def without_headers(text: bytes) -> list[bytes]:
    """Return the lines of a log without those by which Ray tells its processes apart."""
    return [line for line in text.splitlines() if line and not line.startswith(_HEADERS)]


def append_to_log(run_dir: Path, pid: int, line: str) -> None:
    """Append a line to the log of the replica with this pid, if there is one."""
    for name, path in find_logs(run_dir).items():
        if name.endswith(f"-{pid}.log"):
            with contextlib.suppress(OSError), path.open("a") as log:
                log.write(f"{line}\n")


def keep_logs(run_dir: Path, folder: Path) -> None:
    """Replace the contents of ``folder`` by the ends of the run's logs, readable by this user only.

    A disk that takes no more keeps what it has taken."""
    logs = list(find_logs(run_dir).items())
    if not logs:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True)
        for name, path in logs[-MAX_FILES:]:
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(fd, "wb") as kept:
                kept.write(read_end(path, MAX_BYTES))


def read_end(path: Path, size: int, end: int | None = None) -> bytes:
    """Return the last ``size`` bytes before ``end`` (None: the end of the file), from the beginning
    of a line on; empty for a file that cannot be read."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END) if end is None else end
            stream.seek(max(0, end - size))
            text = stream.read(min(size, end))
    except OSError:
        return b""
    return text if end <= size else text.partition(b"\n")[2]


if __name__ == "__main__":
    keep_logs(Path(sys.argv[1]), Path(sys.argv[2]))
