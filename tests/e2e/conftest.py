"""What several files have: the text of one engine, what a directory lists, a small pool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.lib.local_cluster import LocalCluster
from bench.lib.oracle import BUSY_ROUTER, EXACT, Oracle
from bench.lib.standalone import Standalone
from protocol.registry.directory import Directory, WorkerRecord
from protocol.registry.redis_client import connect


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


async def workers(cluster: LocalCluster) -> list[WorkerRecord]:
    """What the directory says now."""
    client = connect(f"unix://{Path(cluster.state.run_dir) / 'redis.sock'}")
    try:
        return await Directory(client, "default").workers.all()
    finally:
        await client.aclose()


async def worker(cluster: LocalCluster, role: str) -> WorkerRecord:
    return next(w for w in await workers(cluster) if w.role == role)


CLIENT_KEY = "sk-of-a-client"


@pytest.fixture(scope="session")
async def small_pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standalone]:
    """One worker of each role without Ray, for clients that have a key."""
    folder = tmp_path_factory.mktemp("small")
    keys = folder / "keys.yaml"
    keys.write_text(json.dumps({CLIENT_KEY: {"tenant": "clients", "scopes": ["admin"]}}))
    keys.chmod(0o600)
    pool = Standalone(
        folder,
        roles=("prefill", "decode"),
        worker_options=EXACT,
        router_options=(*BUSY_ROUTER, "--api-keys", str(keys)),
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
    assert not pool.left()
