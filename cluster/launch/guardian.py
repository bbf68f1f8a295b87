"""The guardian process of `baton up`: runs the supervisor and leaves no process behind.

    baton up ──leash (a pipe)──> guardian ──child──> supervisor ──> Redis, Ray ──> workers, router

The guardian is the subreaper of its tree: a process that loses its parent becomes its direct child.
Once the supervisor has ended, the guardian kills its children until there are none, which ends
every process of the run, in whatever session or group it is. It never hits another process, since
the kernel does not reuse the pid of a child that was not waited for. Only the standard library is
used, so that the guardian works whatever happens to the environment.

- the supervisor ends                          kill what is left, remove the run folder, same status
- SIGTERM or SIGINT                            forward it to the supervisor; a second one: kill all
- the leash breaks (`baton up` was killed)     kill all
- the guardian itself is killed                the supervisor notices, and stops everything itself

Run as: python -I -S guardian.py LEASH_FD RUN_DIR COMMAND [ARGUMENT ...]; LEASH_FD -1: no leash.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphans of this process's tree its children, instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def children() -> list[int]:
    """Return the pids of this process's direct children, including zombies."""
    me = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == me:
            found.append(int(entry.name))
    return found


def kill_descendants() -> None:
    """Kill and reap children until the kernel reports that none is left."""
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


class Guardian:
    """Runs one supervisor. ``leash``: read end of the pipe to `baton up`, -1 for none."""

    def __init__(self, leash: int, command: list[str]) -> None:
        self._leash = leash
        self._command = command
        self._signals = 0

    def run(self) -> int:
        """Run until the whole tree is gone; return the exit status of the supervisor."""
        become_subreaper()
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        child = subprocess.Popen(self._command, pass_fds=self._inherited())
        try:
            return self._watch(child, wake_r)
        finally:
            kill_descendants()

    def _inherited(self) -> tuple[int, ...]:
        # Beside the standard streams, the supervisor inherits only the lock of the state folder.
        lock = os.environ.get("BATON_LOCK_FD")
        return (int(lock),) if lock else ()

    def _watch(self, child: subprocess.Popen[bytes], wake: int) -> int:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if self._leash >= 0:
            poll.register(self._leash, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(1000)}
            if wake in ready and not self._forward(child, os.read(wake, 64)):
                return 130
            if self._leash in ready:
                if not os.read(self._leash, 1):
                    return 137
                poll.unregister(
                    self._leash
                )  # a byte releases the leash: `baton up --detach` is done
            status = child.poll()
            if status is not None:
                return status if status >= 0 else 128 - status
            _reap_adopted(child.pid)

    def _forward(self, child: subprocess.Popen[bytes], numbers: bytes) -> bool:
        """Forward a request to stop; return False when it was the second one."""
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._signals += 1
                child.send_signal(signal.SIGTERM)
        return self._signals < 2


def _reap_adopted(supervisor: int) -> None:
    """Reap dead children, but not the supervisor, whose exit status is still needed."""
    for pid in children():
        if pid != supervisor:
            os.waitpid(pid, os.WNOHANG)


def _keep_logs(run_dir: str) -> None:
    """Copy the logs of the run to the folder that the environment names."""
    folder = os.environ.get("BATON_KEPT_LOGS")
    program = Path(__file__).resolve().parents[1] / "local" / "kept_logs.py"
    if folder and program.is_file():
        subprocess.run([sys.executable, "-I", "-S", str(program), run_dir, folder], check=False)


def main(leash: str, run_dir: str, *command: str) -> int:
    status = Guardian(int(leash), list(command)).run()
    _keep_logs(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
