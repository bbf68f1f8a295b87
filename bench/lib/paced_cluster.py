"""A local cluster under Ray with paced engines, and operations of benchmarks on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from bench.lib.local_cluster import LocalCluster, baton, local_cluster
from bench.lib.paced import Device, Lateness, lateness
from cluster.autoscale.loans import RoleChange, request_role_change
from cluster.local.redis_server import EmbeddedRedis
from protocol.endpoints.grpc_endpoints import EndpointSecurity
from protocol.performance.step_model import StepModel
from protocol.registry.directory import Directory, WorkerRecord
from protocol.registry.redis_client import connect

CLUSTER = "default"
ENGINE = "bench.lib.paced_engine"

DEVICE = StepModel(0.05, 4e-3, 2e-6, 1e-3, 1e-7)
"""Slow enough that the demo model's real steps (one core of 2.6 GHz: 4 ms + 0.3 ms a sequence,
0.13 ms a prompt token) take an eighth of it, so that eight such devices fit on two cores."""

CHUNK, MAX_BATCH, KV_TOKENS = 256, 20, 32768

WORKERS = (
    *("--threads", "1", "--speculation", "off"),
    *("--max-batch", f"{MAX_BATCH}", "--prefill-chunk", f"{CHUNK}", "--kv-tokens", f"{KV_TOKENS}"),
    *("--max-model-len", "2048", "--drain-s", "60"),
    *("--peak-tflops", "0.05", "--peak-gb-per-s", "10"),  # nothing to measure at each start
)


class PacedCluster:
    """A running cluster; ``paced_cluster`` creates and stops it.

    ``folder`` holds the engines' lateness files. This process is no driver of the cluster's Ray,
    because drivers are ended with the cluster.
    """

    def __init__(self, local: LocalCluster, redis_url: str, token: str, folder: Path) -> None:
        self.local = local
        self.redis_url = redis_url
        self.token = token
        self.folder = folder

    @property
    def url(self) -> str:
        return self.local.url

    def lateness(self) -> Lateness:
        """Return the lateness of the steps of all engines so far."""
        return lateness(self.folder)

    @contextlib.asynccontextmanager
    async def directory(self) -> AsyncIterator[Directory]:
        client = connect(self.redis_url)
        try:
            yield Directory(client, CLUSTER)
        finally:
            await client.aclose()

    async def workers(self) -> list[WorkerRecord]:
        """Return the workers that are registered now."""
        async with self.directory() as directory:
            return await directory.workers.all()

    async def lend(self, worker: WorkerRecord, role: str, drain_s: float) -> RoleChange:
        """Make ``worker`` take ``role``. Raises Unavailable."""
        return await request_role_change(
            worker.endpoint,
            worker.instance,
            role,
            drain_s=drain_s,
            token=self.token,
            security=EndpointSecurity(None),
        )

    def scale(self, prefill: int, decode: int) -> None:
        """Set the replicas of each pool, and return when they run. Raises RuntimeError."""
        baton(self.local.home, "scale", f"prefill={prefill}", f"decode={decode}")


@contextlib.contextmanager
def paced_cluster(device: StepModel | None, *arguments: str) -> Iterator[PacedCluster]:
    """Run a cluster with engines paced as ``device``, or unpaced ones for None."""
    with tempfile.TemporaryDirectory(prefix="paced-") as folder:
        redis, token = EmbeddedRedis(Path(folder)), secrets.token_hex(16)
        values = {
            "OMP_NUM_THREADS": "1",
            "BATON_TOKEN": token,
            "BATON_REDIS_URL": redis.url,
        }
        if device is not None:
            values |= Device(device[:5], folder).environment()
            arguments = ("--worker-engine", ENGINE, *arguments)
        redis.start()
        signal.signal(signal.SIGTERM, _end)  # else what runs would stay
        try:
            with _environment(values), local_cluster(*WORKERS, *arguments) as local:
                yield PacedCluster(local, redis.url, token, Path(folder))
        finally:
            redis.stop()


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
