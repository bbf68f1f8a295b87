"""Engines that cannot read, peers that say too much, and hosts that lack something: each costs what
it must, and the blame goes to whom it belongs."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

import grpc
import pytest

from kvtransfer.carriers import local_sockets
from kvtransfer.carriers.local_carrier import LocalCarrier
from kvtransfer.carriers.local_receiving import MappedPeer
from kvtransfer.carriers.tcp_carrier import TcpCarrier
from kvtransfer.peer_fetch import PeerFetch
from protocol.errors import TransferFailed
from protocol.requests import request_to_wire
from protocol.wire import wire_pb2 as pb
from tests.kvtransfer.fake_engine import READY
from tests.kvtransfer.front_process import flowing
from tests.kvtransfer.fronts import (
    Front,
    Receiving,
    a_request,
    make_carrier,
    receiving,
    started,
)


async def received(sender: Front, receiver: Front) -> Receiving:
    transfer = receiving(receiver)
    async with asyncio.timeout(10):
        await transfer.run(sender.endpoint)
    return transfer


async def test_an_arena_that_the_engine_cannot_read_is_avoided_and_mapped_anew() -> None:
    p = Front([make_carrier("local"), make_carrier("grpc")])
    d = Front([make_carrier("local"), make_carrier("grpc")], instance="d")
    async with started(p, d):
        d.engine.maps = False
        task = asyncio.create_task(receiving(d).run(p.endpoint))
        with pytest.raises(TransferFailed, match="arena 1 cannot be mapped"):
            async with asyncio.timeout(2):
                await task
        assert d.receiver.links.offers("p") == ["grpc"], "and not for ever by the broken arena"
        assert (await received(p, d)).carrier == "grpc"
        d.engine.maps = True
        d.receiver.links.succeeded("p", "local")  # as if the time to avoid it were over
        again = await received(p, d)
        assert again.carrier == "local" and again.complete
        await asyncio.gather(p.all_slots_free(), d.all_slots_free())


async def test_slots_that_are_filled_without_end_before_the_arena_is_there_end_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d = Front([make_carrier("local")]), Front([make_carrier("local")], instance="d")
    async with started(p, d):
        p.engine.computes = lambda blocks: False
        monkeypatch.setattr(MappedPeer, "_read", lambda peer: None)
        transfer = receiving(d)
        task = asyncio.create_task(transfer.run(p.endpoint))
        await transfer.running.wait()
        filled = pb.PrefillEvent.Filled(slots=[pb.FilledSlot(slot=1)] * 100)
        await say_without_end(p, pb.PrefillEvent(filled=filled))
        with pytest.raises(TransferFailed, match="slots were filled"):
            async with asyncio.timeout(1.5):
                await task


async def test_events_that_nobody_waits_for_end_the_call() -> None:
    p, d = Front([make_carrier("tcp")]), Front([make_carrier("tcp")], instance="d")
    async with started(p, d):
        p.engine.faults.held_back = 2
        transfer = receiving(d)
        task = asyncio.create_task(transfer.run(p.endpoint))
        await flowing([transfer])
        await say_without_end(p, pb.PrefillEvent(started=pb.PrefillEvent.Started()))
        with pytest.raises(TransferFailed, match="events wait to be read"):
            async with asyncio.timeout(1.5):
                await task


async def say_without_end(front: Front, event: pb.PrefillEvent) -> None:
    """Send an event on the one call to a front again and again."""
    (call,) = front.service._open
    for _ in range(500):
        call.messages.put_nowait(event)


async def test_a_host_that_hides_what_local_needs_can_do_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hidden() -> str:
        raise FileNotFoundError(2, "no boot id")

    monkeypatch.setattr(local_sockets, "host_identity", hidden)
    p = Front([make_carrier("local"), make_carrier("grpc")])
    d = Front([make_carrier("local"), make_carrier("grpc")], instance="d")
    async with started(p, d):
        transfer = receiving(d)
        await transfer.run(p.endpoint)
        assert transfer.carrier == "grpc" and transfer.complete


@pytest.mark.parametrize("state", ["suspected", "cut off"])
async def test_blocks_are_not_fetched_from_a_worker_that_cannot_be_reached(state: str) -> None:
    d = Front([make_carrier("grpc")], instance="d")
    async with started(d):
        context = d.receiver.context()
        if state == "suspected":
            context.channels.suspect("127.0.0.1:9")
        else:
            context.links.failed("p", "grpc", "gone")
        commands: list[object] = []
        d.engine.send = commands.append  # type: ignore[method-assign, assignment]
        source = pb.Fetch(instance="p", endpoint="127.0.0.1:9", blocks=4)
        async with asyncio.timeout(1):
            await PeerFetch(context, 1, a_request(1, 4), source, lambda event: None).run()
        assert not commands


async def test_silent_connections_take_no_thread_of_the_sender() -> None:
    p, d = Front([make_carrier("tcp")]), Front([make_carrier("tcp")], instance="d")
    async with started(p, d):
        carrier = p.carriers[0]
        assert isinstance(carrier, TcpCarrier)
        silent = [socket.create_connection(("127.0.0.1", carrier.port)) for _ in range(40)]
        try:
            async with asyncio.timeout(1.5):
                assert (await received(p, d)).complete
            async with asyncio.timeout(4):
                for sock in silent:  # each is closed, too
                    sock.setblocking(False)
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        finally:
            for sock in silent:
                sock.close()


async def test_only_so_many_offers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = Front([make_carrier("grpc")]), Front([make_carrier("grpc")], instance="d")
    asked: list[str] = []
    monkeypatch.setattr(p.carriers[0], "accept", lambda offer, session: asked.append(offer.name))
    offers = [pb.CarrierOffer(name="grpc"), pb.CarrierOffer(name="x" * 100_000)] * 50
    async with started(p, d):
        stream = d.receiver.context().channels.open_call(p.endpoint)
        start = pb.PrefillStart(
            model=READY.kv_identity,
            request=request_to_wire(a_request(1, 4)),
            instance="p",
            transfer="ab" * 16,
            carriers=offers,
        )
        await stream.write(pb.PrefillCall(start=start))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with asyncio.timeout(3):
                await stream.read()
        stream.cancel()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "no common carrier" in (refused.value.details() or "")
    assert len(asked) < 16


async def test_an_engine_here_that_reads_late_is_no_fault_of_the_link() -> None:
    p, d = Front([make_carrier("local")]), Front([make_carrier("local")], instance="d")
    async with started(p, d):
        d.engine.reads = False
        transfer = receiving(d, 200)  # more frames than the sender has slots
        task = asyncio.create_task(transfer.run(p.endpoint, frame_s=0.3))
        await asyncio.sleep(1.2)
        assert not task.done(), "the sender waits for its slots"
        d.engine.reads = True
        d.engine.read()
        async with asyncio.timeout(5):
            await task
        assert transfer.complete and d.receiver.links.usable("p")


@pytest.mark.parametrize("carrier", ["tcp", "local"])
async def test_a_full_table_of_descriptors_keeps_no_front_busy(
    carrier: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = Front([make_carrier(carrier)]), Front([make_carrier(carrier)], instance="d")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with started(p, d):
        caller = calling(p)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
            await asyncio.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waits = [record for record in caplog.records if "wait" in record.getMessage()]
        assert len(waits) == 1, "and not one for each turn of the event loop"
        assert (await received(p, d)).complete, "it listens again"
        caller.close()


def calling(front: Front) -> socket.socket:
    """Connect to a front whose event loop has not accepted the connection yet."""
    carrier = front.carriers[0]
    if isinstance(carrier, TcpCarrier):
        return socket.create_connection(("127.0.0.1", carrier.port))
    assert isinstance(carrier, LocalCarrier)
    assert carrier._listener is not None
    caller = local_sockets.new_socket()
    caller.connect(carrier._listener.getsockname())
    return caller


def lowest_free_descriptor() -> int:
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    return free
