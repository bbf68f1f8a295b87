"""Checks CPUs, the limit of open files, swap, and disk space."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import DoctorSubject
from cluster.local.run_state import cluster_home_path
from cluster.local.start_report import format_size
from protocol.descriptor_limit import connections_within, descriptors_for, reachable_limit

_TOO_FEW_FILES = 256
_SHM_BYTES = 100 << 20  # Ray's object store, and a margin
_RUN_BYTES = 300 << 20  # logs and sockets of a run
_RAY_FULL = 0.95  # fill level at which Ray begins to refuse work


class DiskSpace(msgspec.Struct, frozen=True):
    """Size and free space, in bytes, of the disk that holds ``path``."""

    path: str
    total: int
    free: int
    writable: bool


class MachineFacts(msgspec.Struct, frozen=True):
    """Facts about this machine. ``open_files``: soft and hard limit; -1 means no limit."""

    cpus: int
    load: float
    open_files: tuple[int, int]
    swap_used: int
    shm: DiskSpace | None
    folders: tuple[DiskSpace, ...]


def collect(subject: DoctorSubject) -> MachineFacts:
    shm = Path("/dev/shm")
    folders = [Path(tempfile.gettempdir()), cluster_home_path(subject.cluster)]
    return MachineFacts(
        cpus=cpu_count(),
        load=os.getloadavg()[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        swap_used=psutil.swap_memory().used,
        shm=_disk_space(shm) if shm.is_dir() else None,
        folders=tuple(_disk_space(folder) for folder in folders),
    )


def cpu_count() -> int:
    """Return the CPUs that this process may use: by its affinity, and by the cgroup's quota."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def _disk_space(path: Path) -> DiskSpace:
    place = next(p for p in (path, *path.parents) if p.is_dir())
    usage = shutil.disk_usage(place)
    return DiskSpace(str(path), usage.total, usage.free, os.access(place, os.W_OK))


def judge(facts: MachineFacts, subject: DoctorSubject) -> list[Finding]:
    return [
        _cpus(facts, subject),
        _open_files(facts.open_files, subject.connections),
        *([] if facts.swap_used < 2**30 else [_swap(facts.swap_used)]),
        *(_shm(facts.shm) if subject.kind == "cluster" else []),
        *(_folder(disk) for disk in facts.folders),
    ]


def _cpus(facts: MachineFacts, subject: DoctorSubject) -> Finding:
    default = max(1, (os.cpu_count() or 2) // 2)
    threads = sum(pool.workers * (pool.engine.threads or default) for pool in subject.pools)
    if subject.device not in (None, "cpu") or threads <= facts.cpus:
        return ok("cpu", f"{facts.cpus} CPUs, load {facts.load:.1f}")
    text = f"{subject.workers} engines with {threads} threads on {facts.cpus} CPUs"
    share = facts.cpus // subject.workers
    remedy = f"--threads {share}" if share else "start fewer workers: these compete for the CPUs"
    return note("cpu", text, remedy)


def _open_files(limits: tuple[int, int], connections: int) -> Finding:
    """Judge the limit that processes get after they have raised it themselves."""
    most = reachable_limit(*limits)
    if most < _TOO_FEW_FILES:
        text = f"at most {most}, too few to start"
        return problem("open files", text, f"ulimit -Hn {descriptors_for(connections)}")
    if connections_within(most) < connections:
        text = f"at most {most}: a router takes {connections_within(most)} connections of clients,"
        text += f" and limits.max_connections is {connections}"
        return note("open files", text, f"ulimit -Hn {descriptors_for(connections)}")
    return ok("open files", f"up to {most}")


def _swap(used: int) -> Finding:
    text = f"{format_size(used)} of swap in use: engines that are swapped out stall their streams"
    return note("swap", text, "free memory, or `swapoff -a`")


def _shm(disk: DiskSpace | None) -> list[Finding]:
    if disk is None or disk.free < _SHM_BYTES:
        free = "is missing" if disk is None else f"has {format_size(disk.free)} free"
        remedy = "in a container: --shm-size=256m"
        return [note("/dev/shm", f"{free}; Ray uses the disk instead", remedy)]
    return [ok("/dev/shm", f"{format_size(disk.free)} free")]


def _folder(disk: DiskSpace) -> Finding:
    if not disk.writable:
        remedy = "set TMPDIR or BATON_HOME to a folder of yours"
        return problem("disk", f"{disk.path} cannot be written to", remedy)
    if disk.free < _RUN_BYTES:
        text = (
            f"{format_size(disk.free)} free at {disk.path}, a run takes {format_size(_RUN_BYTES)}"
        )
        return problem("disk", text, "make room, or set TMPDIR or BATON_HOME to another disk")
    if disk.free < (1 - _RAY_FULL) * disk.total:
        text = f"the disk of {disk.path} is more than {_RAY_FULL:.0%} full, where Ray warns"
        return note("disk", text, "make room, or set TMPDIR to another disk")
    return ok("disk", f"{format_size(disk.free)} free at {disk.path}")
