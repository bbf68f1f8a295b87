"""CPUs, open files, swap, and the room on disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import Wanted
from cluster.local.run_state import home_path
from cluster.local.start_report import size

_FEW_FILES, _TOO_FEW_FILES = 4096, 256
_SHM_BYTES = 100 << 20  # Ray's store, and some
_RUN_BYTES = 300 << 20  # logs and sockets of a run
_FULL = 0.95  # where Ray begins to refuse work


class Room(msgspec.Struct, frozen=True):
    """Of the disk that holds ``path``, in bytes."""

    path: str
    total: int
    free: int
    writable: bool


class Machine(msgspec.Struct, frozen=True):
    """``open_files``: soft and hard limit, -1 is none."""

    cpus: int
    load: float
    open_files: tuple[int, int]
    swap_used: int
    shm: Room | None
    folders: tuple[Room, ...]


def collect(wanted: Wanted) -> Machine:
    shm = Path("/dev/shm")
    folders = [Path(tempfile.gettempdir()), home_path(wanted.cluster)]
    return Machine(
        cpus=cpu_count(),
        load=os.getloadavg()[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        swap_used=psutil.swap_memory().used,
        shm=_room(shm) if shm.is_dir() else None,
        folders=tuple(_room(folder) for folder in folders),
    )


def cpu_count() -> int:
    """CPUs that this process may use, whatever the machine has: affinity, then cgroup quota."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def _room(path: Path) -> Room:
    place = next(p for p in (path, *path.parents) if p.is_dir())
    usage = shutil.disk_usage(place)
    return Room(str(path), usage.total, usage.free, os.access(place, os.W_OK))


def judge(facts: Machine, wanted: Wanted) -> list[Finding]:
    return [
        _cpus(facts, wanted),
        _open_files(facts.open_files),
        *([] if facts.swap_used < 2**30 else [_swap(facts.swap_used)]),
        *(_shm(facts.shm) if wanted.what == "cluster" else []),
        *(_folder(room) for room in facts.folders),
    ]


def _cpus(facts: Machine, wanted: Wanted) -> Finding:
    default = max(1, (os.cpu_count() or 2) // 2)
    threads = sum(pool.workers * (pool.engine.threads or default) for pool in wanted.pools)
    if wanted.device not in (None, "cpu") or threads <= facts.cpus:
        return ok("cpu", f"{facts.cpus} CPUs, load {facts.load:.1f}")
    text = f"{wanted.workers} engines with {threads} threads on {facts.cpus} CPUs"
    share = facts.cpus // wanted.workers
    remedy = f"--threads {share}" if share else "fewer workers: these take turns"
    return note("cpu", text, remedy)


def _open_files(limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}")
    more = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
    if soft < _TOO_FEW_FILES:
        return problem("open files", f"at most {soft}, too few to start", f"ulimit -n {more}")
    text = f"at most {soft}: every client takes one in the router"
    return note("open files", text, f"ulimit -n {more}")


def _swap(used: int) -> Finding:
    text = f"{size(used)} of swap in use: engines that are swapped out stall their streams"
    return note("swap", text, "free memory, or `swapoff -a`")


def _shm(room: Room | None) -> list[Finding]:
    if room is None or room.free < _SHM_BYTES:
        free = "is missing" if room is None else f"has {size(room.free)} free"
        remedy = "in a container: --shm-size=256m"
        return [note("/dev/shm", f"{free}; Ray uses the disk in its place", remedy)]
    return [ok("/dev/shm", f"{size(room.free)} free")]


def _folder(room: Room) -> Finding:
    if not room.writable:
        remedy = "set TMPDIR or BATON_HOME to a folder of yours"
        return problem("disk", f"{room.path} cannot be written to", remedy)
    if room.free < _RUN_BYTES:
        text = f"{size(room.free)} free at {room.path}, a run takes {size(_RUN_BYTES)}"
        return problem("disk", text, "make room, or set TMPDIR or BATON_HOME to another disk")
    if room.free < (1 - _FULL) * room.total:
        text = f"the disk of {room.path} is more than {_FULL:.0%} full, where Ray warns"
        return note("disk", text, "make room, or set TMPDIR to another disk")
    return ok("disk", f"{size(room.free)} free at {room.path}")
