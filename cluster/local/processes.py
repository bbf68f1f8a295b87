"""Identifies processes safely, and kills the processes that a run left behind.

A pid alone is ambiguous, because the kernel may give it to another process later. A ``ProcessId``
therefore also holds the creation time, and a signal only reaches the process that was meant.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

RUN_DIR_VARIABLE = "BATON_RUN_DIR"
"""Environment variable of every process of a run; ``find_run_processes`` looks for it."""


class ProcessId(msgspec.Struct, frozen=True):
    """One process, distinguished from any later process with the same pid."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of process ``pid``. Raises ProcessLookupError if it does not run."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess as e:
            raise ProcessLookupError(pid) from e

    def alive(self) -> bool:
        """Return whether the process still runs; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 0.05
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal if the process is alive; return whether it was."""
        try:
            # The handle pins the process: the pid cannot pass to another between check and kill.
            handle = os.pidfd_open(self.pid)
        except (ProcessLookupError, OSError):
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def find_run_processes(run_dir: Path) -> list[ProcessId]:
    """Return this user's processes that belong to the run, by environment or by open files."""
    marker = f"{RUN_DIR_VARIABLE}={run_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        if _is_marked(entry, marker) or _has_open_file(entry, run_dir):
            try:
                found.append(ProcessId.of(int(entry.name)))
            except ProcessLookupError:
                continue
    return [process for process in found if process.alive()]


def _is_marked(entry: Path, marker: bytes) -> bool:
    try:
        return marker in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return False


def _has_open_file(entry: Path, run_dir: Path) -> bool:
    # Some of Ray's processes overwrite their environment with a title, but keep their logs open.
    prefix = f"{run_dir}/"
    try:
        for descriptor in (entry / "fd").iterdir():
            try:
                if str(descriptor.readlink()).startswith(prefix):
                    return True
            except OSError:
                continue
    except OSError:
        pass
    return False


def kill_all(processes: Iterable[ProcessId], deadline_s: float = 5.0) -> list[ProcessId]:
    """Send SIGKILL to all processes; return those that are still alive after ``deadline_s``."""
    remaining = [process for process in processes if process.signal(signal.SIGKILL)]
    end = time.monotonic() + deadline_s
    while remaining and time.monotonic() < end:
        time.sleep(0.05)
        remaining = [process for process in remaining if process.alive()]
    return remaining


def kill_run_processes(run_dir: Path, rounds: int = 3) -> int:
    """Kill every process of a run, including those forked meanwhile; return how many were killed.

    Raises RuntimeError when a process survives SIGKILL.
    """
    count = 0
    for _ in range(rounds):
        processes = find_run_processes(run_dir)
        if not processes:
            return count
        count += len(processes)
        kill_all(processes)
    still = find_run_processes(run_dir)
    if still:
        raise RuntimeError(f"processes survive SIGKILL: {[process.pid for process in still]}")
    return count
