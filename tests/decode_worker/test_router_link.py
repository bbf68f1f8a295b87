"""When a worker tells its routers about its load."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker import router_link
from decode_worker.request import DecodeRequest
from decode_worker.router_link import RouterLink, WaitingOutputs
from decode_worker.service import PUSH_S, DecodeService, load_has_changed
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
    assert not link._news.is_set(), "one message for both"


BUSY = pb.Load(running=40, waiting=0, kv_tokens_free=5000, kv_tokens_total=10_000)


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"running": 41, "kv_tokens_free": 4900}, False),
        ({"running": 43}, True),
        ({"running": 37}, True),
        ({"kv_tokens_free": 4600}, True),
        ({"kv_tokens_unused": 400}, True),
        ({"queued_tokens": 1}, True),
        ({"latest_prompts": [1, 2, 3]}, False),
        ({"latest_prompts": [1, 2, 3, 4]}, True),
        ({"down": True}, True),
    ],
)
def test_only_a_load_that_could_change_a_placement_is_pushed(
    changes: dict[str, Any], is_told: bool
) -> None:
    load = pb.Load()
    load.CopyFrom(BUSY)
    load.MergeFrom(pb.Load(**changes))
    assert load_has_changed(load, BUSY) == is_told


async def test_loads_are_pushed_soon_and_not_too_often() -> None:
    """The engine's beats come more often than routers are told."""
    session = SimpleNamespace(
        ready=SimpleNamespace(kv_tokens=3200),
        beat=EngineBeat(0, 0, 0, 100),
        queued_tokens=0,
        queued_prompts=0,
        latest_prompts=[3, 5],
    )
    engine: Any = SimpleNamespace(current=session)
    service = DecodeService(engine, cast("KVReceiver", None), "d")
    link = RouterLink()
    service._links.add(link)
    told = []
    async with asyncio.timeout(5):
        messages = link.messages(service._load)
        first = await anext(messages)  # a heartbeat
        assert list(first.load.latest_prompts) == [3, 5]
        began = asyncio.get_running_loop().time()
        for running in range(1, 7):
            session.beat = EngineBeat(running, 0, 0, 100)
            engine.on_load()
            await asyncio.sleep(0.008)
            while link._news.is_set():
                told.append((await anext(messages)).load.running)
        most = 1 + (asyncio.get_running_loop().time() - began) / PUSH_S
        assert 1 <= len(told) <= most
        while told[-1] != 6:
            told.append((await anext(messages)).load.running)
    assert service._told.running == 6
    engine.on_load()
    await asyncio.sleep(1.5 * PUSH_S)
    assert not link._news.is_set(), "nothing has changed"


def token(name: str, number: int, **fields: Any) -> pb.Output:
    return pb.Output(id=name, tokens=[number], **fields)


async def test_a_router_that_reads_slowly_gets_larger_messages_and_keeps_its_stream() -> None:
    """Once 2,048 messages closed the stream: 20 s of steps of 10 ms."""
    link, steps = RouterLink(), 5000
    messages = link.messages(pb.Load)
    await anext(messages)
    for step in range(steps):
        for name in ("a", "b"):
            link.emit(token(name, step, cached_tokens=64))
        await asyncio.sleep(0)
    link.emit(pb.Output(id="a", finish=pb.FINISH_STOP, timeline=[pb.Mark(event="finished")]))
    link.emit(pb.Output(id="b", finish=pb.FINISH_ERROR, retryable=True, error="lost"))
    outputs = {output.id: output for output in (await anext(messages)).outputs}
    assert not link.closed
    for output in outputs.values():
        assert (list(output.tokens), output.cached_tokens) == (list(range(steps)), 64)
    assert outputs["a"].finish == pb.FINISH_STOP and outputs["a"].timeline[0].event == "finished"
    assert (outputs["b"].finish, outputs["b"].error) == (pb.FINISH_ERROR, "lost")
    link.emit(token("a", 1))
    assert [list(o.tokens) for o in (await anext(messages)).outputs] == [[1]], "a new output"


def test_deaths_of_merged_outputs_are_added() -> None:
    waiting = WaitingOutputs()
    for output in (pb.Output(id="a", deaths=1), pb.Output(id="a", deaths=1), token("a", 7)):
        waiting.add(output)
    [output] = waiting.take()
    assert (output.deaths, list(output.tokens)) == (2, [7])


def test_what_waits_leaves_in_order_and_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_link, "MESSAGE_BYTES", 100)
    monkeypatch.setattr(router_link, "MERGED_BYTES", 40)
    waiting, found, sizes = WaitingOutputs(), dict[str, list[int]](), []
    for number in range(50):
        for name in ("a", "b", "c"):
            waiting.add(token(name, 1000 + number))
    waiting.add(pb.Output(id="large", tokens=range(1000, 1200)))
    waiting.add(token("large", 1200))
    while waiting:
        outputs = waiting.take()
        sizes.append(sum(output.ByteSize() for output in outputs))
        for output in outputs:
            found.setdefault(output.id, []).extend(output.tokens)
        assert sizes[-1] <= 100 or len(outputs) == 1
    assert len(sizes) > 5 and max(sizes) > 100, "an output larger than a message is alone in it"
    assert all(found[name] == list(range(1000, 1050)) for name in "abc")
    assert found["large"] == list(range(1000, 1201))
    assert waiting.size == 0 and not waiting._last


async def test_a_router_that_does_not_read_loses_its_stream_and_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_link, "MAX_WAITING_BYTES", 1000)
    link, cancelled = RouterLink(), list[str]()
    link.requests["a"] = cast(
        "DecodeRequest", SimpleNamespace(cancel=lambda: cancelled.append("a"))
    )
    messages = link.messages(pb.Load)
    await anext(messages)
    for number in range(2000):
        link.emit(token("a", number))
    await asyncio.sleep(0)
    assert link.closed and cancelled == ["a"]
    async with asyncio.timeout(5):
        assert [message async for message in messages] == []


async def test_a_stream_that_is_closed_ends_after_what_waits() -> None:
    link = RouterLink()
    messages = link.messages(pb.Load)
    await anext(messages)
    link.emit(token("a", 1))
    link.close()
    link.emit(token("a", 2))
    async with asyncio.timeout(5):
        assert [[list(o.tokens) for o in m.outputs] async for m in messages] == [[[1]]]


def test_outputs_of_two_requests_with_one_id_are_not_merged() -> None:
    waiting = WaitingOutputs()
    for _ in range(2):
        waiting.add(pb.Output(id="a", finish=pb.FINISH_ERROR))
    assert [output.finish for output in waiting.take()] == [pb.FINISH_ERROR] * 2
