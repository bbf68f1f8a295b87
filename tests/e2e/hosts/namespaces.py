"""Processes that are the first of a PID namespace, and commands in the namespaces of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.local import die_with_parent
from tests.system import program

_BOOT_S = 10.0


def enter(pid: int, kinds: str, *command: str) -> list[str]:
    """A command line in the namespaces of ``pid``. ``kinds``: letters of nsenter(1), of "mnuip"."""
    return [program("nsenter"), f"--target={pid}", *(f"-{kind}" for kind in kinds), *command]


def first_of_new(
    kinds: Sequence[str], script: str, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts a shell script as process 1 of new namespaces (options of unshare(1), like "net").
    The kernel kills it, and so all of them, when the calling thread's process ends.

    ``within``: an ``enter`` to go before. The script's last line should exec something that stays.
    """
    wrapper = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
    new = [f"--{kind}" for kind in ("pid", "fork", "kill-child", *kinds)]
    command = [*within, program("unshare"), *new, "/bin/sh", "-euc", script]
    return subprocess.Popen(
        [*wrapper, *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def first_process(started: subprocess.Popen[bytes]) -> int:
    """Our pid of the process that has pid 1 in the namespace that ``started`` made."""
    end = time.monotonic() + _BOOT_S
    while time.monotonic() < end and started.poll() is None:
        pid = _descend(started.pid)
        if pid is not None:
            return pid
        time.sleep(0.01)
    assert started.stderr is not None
    started.kill()
    said = started.stderr.read().decode(errors="replace")
    raise RuntimeError(f"no namespace was made (status {started.wait()}): {said}")


def _descend(pid: int) -> int | None:
    """The first process of a namespace deeper than that of ``pid``, among its descendants."""
    depth = len(_numbers(pid))
    while True:
        children = _children(pid)
        if not children:
            return None
        pid = children[0]
        if len(_numbers(pid)) > depth and _numbers(pid)[-1] == 1:
            return pid


def _numbers(pid: int) -> list[int]:
    """A process's pids, from our namespace to its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return [int(n) for line in lines if line.startswith("NSpid:") for n in line.split()[1:]]


def _children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def members(first: int) -> list[int]:
    """Our pids of the processes whose own PID namespace is that of ``first``."""
    space = Path(f"/proc/{first}/ns/pid").readlink()
    processes = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(int(entry.name) for entry in processes if _space(entry) == space)


def _space(entry: Path) -> Path | None:
    try:
        return (entry / "ns/pid").readlink()
    except OSError:
        return None
