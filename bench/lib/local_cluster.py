"""A local cluster for a benchmark or a test, between `baton up --detach` and `baton down`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from cluster.local.ports import free_ports
from cluster.local.run_state import RunState


class LocalCluster:
    """A running cluster; ``local_cluster`` starts and stops it.

    ``state`` has its URL and its processes.
    """

    def __init__(self, home: Path, state: RunState) -> None:
        self.home = home
        self.state = state

    @property
    def url(self) -> str:
        return self.state.url

    def processes(self) -> list[psutil.Process]:
        """Return the guardian and all its descendants."""
        assert self.state.guardian is not None
        guardian = psutil.Process(self.state.guardian.pid)
        return [guardian, *guardian.children(recursive=True)]

    def resident_bytes(self) -> int:
        """Add up the resident sets; shared pages count once per process."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def baton(home: Path, *arguments: str, timeout_s: float = 300.0) -> str:
    """Run a `baton` command and return its output. Raises RuntimeError with the output."""
    result = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", *arguments],
        env={**os.environ, "BATON_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if result.returncode:
        raise RuntimeError(f"baton {' '.join(arguments)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


@contextlib.contextmanager
def local_cluster(*arguments: str) -> Iterator[LocalCluster]:
    """Run `baton up` with ``arguments``, and `baton down` at the end in any case."""
    with tempfile.TemporaryDirectory(prefix="baton-home-") as folder:
        home, port = Path(folder), free_ports("127.0.0.1", 1)[0]
        try:
            baton(home, "up", "--detach", "--port", str(port), *arguments)
            state = msgspec.json.decode((home / "default/state.json").read_bytes(), type=RunState)
            yield LocalCluster(home, state)
        finally:
            baton(home, "down")
