"""Processes of ``bench.router_capacity``: Redis, fake workers and the routers that are measured."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from cluster.local.ports import free_ports
from cluster.local.redis_server import EmbeddedRedis

HOST = "127.0.0.1"
START_S = 60.0
WORKERS = 4
"""Decode workers, and prefill workers."""

STEP_S = 0.01
"""Of a decode worker."""

OPTIONS = ("--admission-ttft-ms", "600000", "--admission-queue-ms", "600000")
"""All streams of a load begin at once: none of them is to be refused."""


class RouterSet:
    """Router processes of one checkout. Created and closed by ``capacity_pool``."""

    def __init__(self, source: Path, count: int, env: dict[str, str], profile: Path | None) -> None:
        self.ports = free_ports(HOST, count)
        wrapper = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, *wrapper, "-m", "cluster.cli.main"),
                    *("router", "--port", str(port), *OPTIONS),
                ],
                env=env | {"PYTHONPATH": str(source)},
                cwd=source,
                stdout=subprocess.DEVNULL,
            )
            for port in self.ports
        ]

    def wait_ready(self, workers: int) -> None:
        """Return when every router is attached to all decode workers. Raises TimeoutError."""
        ends = time.monotonic() + START_S
        for port in self.ports:
            while _attached(port) < workers:
                if time.monotonic() > ends:
                    raise TimeoutError(f"a router is not ready after {START_S:g} s")
                time.sleep(0.2)

    def pin(self, cores: Sequence[int]) -> None:
        """Give each router one of ``cores``, its threads included."""
        for index, process in enumerate(self._processes):
            core = cores[index % len(cores)]
            for thread in psutil.Process(process.pid).threads():
                os.sched_setaffinity(thread.id, {core})

    def cpu_s(self) -> float:
        """Return the processor time of the routers so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(t.user + t.system for t in times)

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(START_S)


def _attached(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/ready", timeout=5.0) as response:
            return int(msgspec.json.decode(response.read())["decode_workers"])
    except OSError:
        return 0


@contextlib.contextmanager
def capacity_pool(
    sources: Sequence[Path], count: int, profile: Path | None = None
) -> Iterator[list[RouterSet]]:
    """Run Redis, fake workers, and ``count`` routers of each checkout in ``sources``."""
    cores = sorted(os.sched_getaffinity(0))
    router_cores = cores[1:] or cores
    step_s = STEP_S * max(1.0, count / len(router_cores))
    with tempfile.TemporaryDirectory(prefix="cap-") as folder, contextlib.ExitStack() as stack:
        redis = EmbeddedRedis(Path(folder))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BATON_TOKEN": secrets.token_hex(16),
            "BATON_SECRET": secrets.token_hex(16),
            "BATON_REDIS_URL": redis.url,
        }
        redis.start()
        stack.callback(redis.stop)
        command = [sys.executable, "-m", "bench.router.fake_decode", str(WORKERS), str(step_s)]
        workers = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        stack.callback(workers.wait)
        stack.callback(workers.kill)
        assert workers.stdout is not None
        if workers.stdout.readline() != b"ready\n":
            raise RuntimeError("the fake workers did not start")
        sets = []
        for source in sources:
            sets.append(RouterSet(source, count, env, profile))
            stack.callback(sets[-1].close)
        for routers in sets:
            routers.wait_ready(WORKERS)
            routers.pin(router_cores)
        for pid in (os.getpid(), workers.pid):
            os.sched_setaffinity(pid, cores[:1])
        yield sets
