from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import Start, until
from tests.router.fake_worker import outputs


async def test_the_version_is_that_of_the_package(start: Start) -> None:
    cluster = await start(outputs())
    assert (await cluster.client.get("/version")).json() == {"version": metadata.version("baton")}


async def test_the_load_counts_requests_in_the_router(start: Start) -> None:
    go_on = asyncio.Event()

    async def waits(request: pb.Request) -> AsyncIterator[pb.Output]:
        await go_on.wait()
        async for output in outputs()(request):
            yield output

    cluster = await start(waits)
    task = asyncio.create_task(cluster.post(prompt="hi", n=3))
    await until(lambda: bool(cluster.workers[0].requests))
    assert (await cluster.client.get("/load")).json() == {"server_load": 3}
    go_on.set()
    assert (await task).status_code == 200
    assert (await cluster.client.get("/load")).json() == {"server_load": 0}


async def test_they_need_a_key(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1: acme")
    keys.chmod(0o600)
    cluster = await start(api_keys=str(keys))
    for path in ("/version", "/load"):
        assert (await cluster.client.get(path)).status_code == 401
        response = await cluster.client.get(path, headers={"authorization": "Bearer sk-1"})
        assert response.status_code == 200
