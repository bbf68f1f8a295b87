"""When a worker tells its routers about its load."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.service import PUSH_S, DecodeService, RouterLink, load_has_changed
from engine.ipc.messages import EngineBeat
from kvtransfer.receiver_context import KVReceiver
from protocol.wire import wire_pb2 as pb


@pytest.mark.parametrize("handed_back", [True, False])
async def test_load_comes_with_a_request_that_is_handed_back(handed_back: bool) -> None:
    """Otherwise routers would send the next requests to an engine that has just died."""
    link = RouterLink()
    messages = link.messages(lambda: pb.Load(running=1))
    assert (await anext(messages)).HasField("load")  # the first heartbeat
    link.emit(pb.Output(id="a", finish=pb.FINISH_ERROR, retryable=handed_back))
    async with asyncio.timeout(5):
        message = await anext(messages)
    assert [output.id for output in message.outputs] == ["a"]
    assert message.HasField("load") == handed_back


async def test_a_pushed_load_says_which_submits_it_contains() -> None:
    link = RouterLink()
    messages = link.messages(lambda: pb.Load(running=1))
    await anext(messages)  # the first heartbeat
    link.submits_seen = 3
    link.push_load()
    link.push_load()
    async with asyncio.timeout(0.4):  # less than HEARTBEAT_S
        message = await anext(messages)
    assert (message.load.running, message.load.submits_seen) == (1, 3)
    assert link._queue.empty(), "one message for both"


BUSY = pb.Load(running=40, waiting=0, kv_tokens_free=5000, kv_tokens_total=10_000)


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"running": 41, "kv_tokens_free": 4900}, False),
        ({"running": 43}, True),
        ({"running": 37}, True),
        ({"kv_tokens_free": 4600}, True),
        ({"queued_tokens": 1}, True),
        ({"down": True}, True),
    ],
)
def test_only_a_load_that_could_change_a_placement_is_pushed(
    changes: dict[str, int], is_told: bool
) -> None:
    load = pb.Load()
    load.CopyFrom(BUSY)
    for name, value in changes.items():
        setattr(load, name, value)
    assert load_has_changed(load, BUSY) == is_told


async def test_loads_are_pushed_soon_and_not_too_often() -> None:
    """The engine's beats come more often than routers are told."""
    session = SimpleNamespace(ready=SimpleNamespace(kv_tokens=3200), beat=EngineBeat(0, 0, 0, 100))
    engine: Any = SimpleNamespace(current=session)
    service = DecodeService(engine, cast("KVReceiver", None), "d")
    link = RouterLink()
    service._links.add(link)
    told = []
    async with asyncio.timeout(5):
        messages = link.messages(service._load)
        await anext(messages)  # the first heartbeat
        began = asyncio.get_running_loop().time()
        for running in range(1, 7):
            session.beat = EngineBeat(running, 0, 0, 100)
            engine.on_load()
            await asyncio.sleep(0.008)
            while not link._queue.empty():
                told.append((await anext(messages)).load.running)
        most = 1 + (asyncio.get_running_loop().time() - began) / PUSH_S
        assert 1 <= len(told) <= most
        while told[-1] != 6:
            told.append((await anext(messages)).load.running)
    assert service._told.running == 6
    engine.on_load()
    await asyncio.sleep(1.5 * PUSH_S)
    assert link._queue.empty(), "nothing has changed"
