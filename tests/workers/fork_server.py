"""A process that has imported torch and forks the engines of tests.

The import takes two seconds of a core and a fork some milliseconds; these tests start hundreds of
engines. Only the default engine is forked; any other one is started as the product starts it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import IO, Any

import pytest

from cluster.config.schema import Config

ENGINE = Config().worker.engine


class ForkedEngine:
    """The part of ``Popen`` that ``engine.process.session`` uses, for a forked engine."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1  # it has ended already

    def poll(self) -> int | None:
        return None if self._pidfd >= 0 and not self._ended(0) else 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._pidfd >= 0 and not self._ended(timeout):
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return 0

    def _ended(self, timeout: float | None) -> bool:
        """Whether the process has ended within ``timeout`` seconds; a pidfd is readable then."""
        return bool(select.select([self._pidfd], [], [], timeout)[0])

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


class ForkServer:
    """The test process's hold on its fork server, which ends with its socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )

    def popen(self, argv: Sequence[str], pass_fds: Sequence[int], stdin: int) -> Any:
        """Stand in for ``subprocess.Popen`` in ``engine.process.session.spawn``."""
        if tuple(argv[1:3]) != ("-m", ENGINE):
            return subprocess.Popen(argv, pass_fds=pass_fds, stdin=stdin)
        spec, write = os.pipe()
        socket.send_fds(self._socket, [b"."], [spec, *pass_fds])
        os.close(spec)
        pid = int.from_bytes(self._socket.recv(4), "little")
        return ForkedEngine(pid, os.fdopen(write, "wb"))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


@contextlib.contextmanager
def engines_are_forked() -> Iterator[None]:
    """Have ``engine.process.session`` fork its engines for as long as this is open."""
    server = ForkServer()
    shim = SimpleNamespace(
        Popen=server.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.process.session.subprocess", shim)
            yield
    finally:
        server.close()


def serve(sock: socket.socket) -> None:
    """Fork an engine for each message, which has its standard input, sockets and shared memory."""
    import engine.execution.loading
    import engine.process.server  # noqa: F401
    from cluster.worker import engine_main

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps engines that end
    while True:
        data, fds, *_ = socket.recv_fds(sock, 1, 4)
        if not data:
            return
        pid = os.fork()
        if not pid:
            sock.close()
            _run(engine_main.main, *fds)
        for fd in fds:
            os.close(fd)
        sock.send(pid.to_bytes(4, "little"))


def _run(main: Any, spec: int, sock: int, arena: int, slots: int) -> None:
    """Be an engine, in a child of the fork server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(spec, 0)
    sys.stdin = open(0)  # noqa: SIM115
    sys.argv = [ENGINE, str(sock), str(arena), str(slots)]
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
