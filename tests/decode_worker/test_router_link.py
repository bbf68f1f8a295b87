"""When a worker tells its routers about its load."""

from __future__ import annotations

import asyncio

import pytest

from decode_worker.service import RouterLink
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
