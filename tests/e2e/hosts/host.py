"""One machine of a network: its namespaces, its files, and what runs in it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.hosts import namespaces
from tests.system import program

USER = "root"
HOME = "/run/home"
"""The same path on each machine, and another folder."""

_REPOSITORY = Path(__file__).parents[3]
_TMP = "/tmp"  # a private one for each, where what the interpreter needs must stay seen


class Host:
    """A machine. ``place``: its folder, as a path of the room; it is /run there."""

    def __init__(self, name: str, address: str, room: int, place: str) -> None:
        self.name = name
        self.address = address
        self._room = room
        self._place = place
        self._boot: subprocess.Popen[bytes] | None = None
        self._first = 0

    @property
    def pid(self) -> int:
        """Our pid of its first process, which is sshd."""
        assert self.up, f"{self.name} is off"
        return self._first

    @property
    def up(self) -> bool:
        return self._boot is not None and self._boot.poll() is None

    @property
    def root(self) -> Path:
        """Its files, seen from here."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def home(self) -> Path:
        return Path(f"{self.root}{HOME}")

    def boot(self) -> None:
        assert not self.up
        room = namespaces.enter(self._room, "mp")
        kinds = ("net", "mount", "uts", "ipc")
        self._boot = namespaces.first_of_new(kinds, _script(self.name, self._place), room)
        self._first = namespaces.first_process(self._boot)

    def kill(self) -> None:
        """Takes its power: every process of it is gone at the return."""
        assert self._boot is not None
        os.kill(self._first, signal.SIGKILL)
        self._boot.wait(10.0)

    def command(self, line: str) -> list[str]:
        """What runs a line of shell there, as a login does: with its home, and little else."""
        environment = [f"HOME={HOME}", f"USER={USER}", f"LOGNAME={USER}", "LANG=C.UTF-8"]
        path = f"PATH={os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        login = ["env", "-i", *environment, path, "bash", "-lc", f"cd; {line}"]
        return namespaces.enter(self.pid, "mnuip", *login)

    def start(
        self, line: str, stdin: int = subprocess.DEVNULL, output: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Starts a line of shell there, in a session of its own; its output is text."""
        return subprocess.Popen(
            self.command(line),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, line: str, timeout_s: float = 30.0, environment: Mapping[str, str] = {}) -> str:
        """Output of a line of shell there. Raises RuntimeError, with the output, if it fails, and
        TimeoutError if it does not end; it is killed then."""
        words = "".join(
            f"export {key}={shlex.quote(value)}; " for key, value in environment.items()
        )
        process = self.start(words + line)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise TimeoutError(f"{self.name}: {line}: not in {timeout_s} s:\n{output}") from None
        if process.returncode:
            raise RuntimeError(f"{self.name}: {line}: status {process.returncode}:\n{output}")
        return output

    def processes(self) -> dict[int, str]:
        """Command lines of what runs there, but for the sshd, by our pids."""
        found = {pid: _command_line(pid) for pid in namespaces.members(self.pid)}
        return {
            pid: line
            for pid, line in found.items()
            if pid != self.pid and line and "sshd:" not in line
        }

    def wait_for(self, line: str, within_s: float = 10.0) -> None:
        """Until a line of shell there succeeds. Raises TimeoutError, with its last output."""
        end = time.monotonic() + within_s
        while True:
            try:
                self.run(line)
                return
            except RuntimeError as e:
                if time.monotonic() > end:
                    raise TimeoutError(f"not in {within_s} s: {e}") from e
            time.sleep(0.1)


def _command_line(pid: int) -> str:
    """Empty for one that is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _script(name: str, place: str) -> str:
    """What the first process of a machine does: mounts, then sshd."""
    kept = [path for path in _needed() if path.is_relative_to(_TMP)]
    lines = [
        "mount -t proc proc /proc",
        f"hostname {name}",
        "mount -t tmpfs shm /dev/shm",
        *(f"mount --bind {place}/etc/{file} /etc/{file}" for file in ("passwd", "hosts")),
        f"if [ -e /etc/resolv.conf ]; then mount --bind {place}/etc/none /etc/resolv.conf; fi",
        f"mkdir -p {place}/outside {place}/tmp",
        f"mount --rbind {_TMP} {place}/outside",
        f"mount --bind {place}/tmp {_TMP}",
    ]
    for path in kept:
        outside = f"{place}/outside/{path.relative_to(_TMP)}"
        lines += [f"mkdir -p {path}", f"mount --rbind {outside} {path}"]
    lines += [
        f"umount -l {place}/outside",
        f"rmdir {place}/outside",
        f"chmod 1777 {_TMP}",
        f"mount --rbind {place} /run",
        f"exec {program('sshd')} -D -f /run/etc/sshd_config -E /run/sshd.log",
    ]
    return "\n".join(lines)


def _needed() -> set[Path]:
    """Folders without which this repository's programs do not run."""
    return {_REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
