"""Processes by identity, and the leftovers of a run.

A pid alone says nothing: it may have been given to another process since. A ``ProcessId`` also
holds the time of creation, so that only the process that was meant is ever signalled.
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
"""Set in the environment of everything that a run starts; the sweep finds processes by it."""


class ProcessId(msgspec.Struct, frozen=True):
    """A process, and no other that gets its pid later."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises ProcessLookupError when there is no such process."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess as e:
            raise ProcessLookupError(pid) from e

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 0.05
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal if it is alive; whether it was."""
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


def leftovers(run_dir: Path) -> list[ProcessId]:
    """Every process of this user that belongs to the run, by its environment or its open files."""
    marker = f"{RUN_DIR_VARIABLE}={run_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        if _is_marked(entry, marker) or _has_open(entry, run_dir):
            try:
                found.append(ProcessId.of(int(entry.name)))
            except ProcessLookupError:
                continue
    return [process for process in found if process.alive()]


def _is_marked(entry: Path, marker: bytes) -> bool:
    try:
        return marker in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def _has_open(entry: Path, run_dir: Path) -> bool:
    # Some of Ray's processes overwrite their environment with a title; their logs give them away.
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
    """SIGKILL to all of them; returns those that are alive after ``deadline_s``."""
    remaining = [process for process in processes if process.signal(signal.SIGKILL)]
    end = time.monotonic() + deadline_s
    while remaining and time.monotonic() < end:
        time.sleep(0.05)
        remaining = [process for process in remaining if process.alive()]
    return remaining


def sweep(run_dir: Path, rounds: int = 3) -> int:
    """Kills what is left of a run, what it forked meanwhile too; returns how many there were.

    Raises RuntimeError when something survives SIGKILL.
    """
    count = 0
    for _ in range(rounds):
        processes = leftovers(run_dir)
        if not processes:
            return count
        count += len(processes)
        kill_all(processes)
    still = leftovers(run_dir)
    if still:
        raise RuntimeError(f"processes survive SIGKILL: {[process.pid for process in still]}")
    return count
