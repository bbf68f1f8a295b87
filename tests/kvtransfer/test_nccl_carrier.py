"""The carrier ``nccl`` over gloo: the cases of all carriers, and what concerns it alone.

The engines are fake, but their pairs are real: ``EnginePairs`` between the slots of two arenas.
"""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import grpc
import pytest

from engine.collectives import pair_groups
from kvtransfer.carriers.nccl_carrier import NcclCarrier
from protocol.errors import CarrierFailed, PeerLost, StartupError
from protocol.wire import wire_pb2 as pb
from tests.kvtransfer.front_process import FLOWING, IDLE, child, flowing
from tests.kvtransfer.fronts import Front, make_carrier, receiving, started
from tests.kvtransfer.test_carriers import (  # noqa: F401
    Pair,
    pair,
    received,
    slots_free,
    start_message,
    test_64_transfers_at_once,
    test_a_cancelled_transfer_returns_soon,
    test_a_frame_that_comes_twice_ends_the_transfer,
    test_a_frame_with_another_piece_ends_the_transfer,
    test_a_receiver_that_dies_or_stands_still_keeps_no_slot,
    test_a_receiver_that_reads_nothing_loses_its_transfer,
    test_a_wrong_checksum_is_noticed_before_a_page_is_written,
    test_an_address_that_is_none_is_refused,
    test_another_engine_has_another_arena,
    test_cached_blocks_are_fetched,
    test_frames_arrive_whole_and_slots_go_back,
    test_frames_in_any_order_are_taken,
    test_silence_counts_from_the_first_frame_that_is_due,
)


@pytest.fixture
def carrier() -> str:
    return "nccl"


def groups_of(front: Front) -> pair_groups.PairGroups:
    thread = front.engine.pairs._thread
    assert thread is not None
    return thread._groups


async def test_pair_that_the_sender_dropped_is_made_anew(pair: Pair) -> None:  # noqa: F811
    p, d = pair
    assert (await received(pair)).complete
    (before,) = groups_of(d)._pairs
    groups_of(p).close(before)  # the thread is idle
    assert (await received(pair)).complete
    (after,) = groups_of(d)._pairs
    assert after != before
    (row,) = d.receiver.links.rows()
    assert (row.transfers, row.failures) == (2, 0)


async def test_three_senders_and_three_receivers_at_once() -> None:
    senders = [Front([make_carrier("nccl")], instance="p") for _ in range(3)]
    receivers = [Front([make_carrier("nccl")], instance=f"d{i}") for i in range(3)]
    async with started(*senders, *receivers):
        transfers = [receiving(d, 30) for d in receivers for _ in range(6)]
        async with asyncio.timeout(30):
            runs = [t.run(senders[i % 3].endpoint) for i, t in enumerate(transfers)]
            await asyncio.gather(*runs)
        assert all(t.complete and t.carrier == "nccl" for t in transfers)
        await slots_free(*senders, *receivers)


async def test_worker_that_sends_by_pairs_receives_by_another_carrier() -> None:
    both = [Front([make_carrier("nccl"), make_carrier("grpc")], instance=i) for i in "xy"]
    x, y = both
    async with started(*both):
        x.engine.faults.held_back = 2
        out = receiving(y)
        task = asyncio.create_task(out.run(x.endpoint, instance="x"))
        await flowing([out])
        back = receiving(x)
        await back.run(y.endpoint, instance="y")
        assert (out.carrier, back.carrier) == ("nccl", "grpc")
        assert back.complete
        task.cancel()
        await asyncio.wait([task])
        await slots_free(x, y)


def sequences(*numbers: int) -> pb.PairMessage:
    return pb.PairMessage(pair="a" * 32, open=True, sequences=numbers)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([sequences(7)], "asked for, and does not wait"),
        ([sequences(0), sequences(0)], "cannot be opened"),
        ([sequences(0), pb.PairMessage(pair="a" * 32, sequences=[0])], "does not wait"),
        ([pb.PairMessage(pair="", open=True)], "cannot be opened"),
        ([pb.PairMessage(pair="a" * 65, open=True)], "cannot be opened"),
        ([pb.PairMessage(pair="a", open=True, values={"k": bytes(1 << 17)})], "131072 bytes"),
    ],
)
async def test_requests_that_cannot_be_right_end_the_call(
    pair: Pair,  # noqa: F811
    messages: list[pb.PairMessage],
    why: str,
) -> None:
    p, d = pair
    call = d.receiver.context().channels.open_call(p.endpoint)
    await call.write(pb.PrefillCall(start=start_message(d, "nccl")))
    await call.write(pb.PrefillCall(credits=1))
    while (await call.read()).WhichOneof("body") != "filled":
        pass
    for message in messages:
        await call.write(pb.PrefillCall(pair=message))
    with pytest.raises(grpc.aio.AioRpcError, match=why):
        async with asyncio.timeout(5):
            while await call.read():
                pass
    async with asyncio.timeout(2 * pair_groups.OPEN_S):  # of a pair that D never opens
        while sorted(p.engine.outbound) != p.engine.arena.shape.outbound_slots():
            await asyncio.sleep(0.05)


async def test_pair_of_another_worker_cannot_be_used(pair: Pair) -> None:  # noqa: F811
    p, d = pair
    assert (await received(pair)).complete
    (theirs,) = groups_of(d)._pairs
    stranger = Front([make_carrier("nccl")], instance="d")
    async with started(stranger):
        call = stranger.receiver.context().channels.open_call(p.endpoint)
        await call.write(pb.PrefillCall(start=start_message(stranger, "nccl")))
        await call.write(pb.PrefillCall(pair=pb.PairMessage(pair=theirs, sequences=[0])))
        with pytest.raises(grpc.aio.AioRpcError, match="another worker's pair"):
            while await call.read():
                pass
    assert (await received(pair)).complete


async def test_sender_whose_library_cannot_be_reached_costs_one_attempt(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control connection works, and what the engines say to each other is lost."""
    p, d = pair
    monkeypatch.setattr(p.engine.pairs, "submit", lambda command: None)
    with pytest.raises(CarrierFailed, match="could not be connected"):
        async with asyncio.timeout(pair_groups.OPEN_S + 1.5):
            await receiving(d).run(p.endpoint, frame_s=30)
    assert not d.receiver.links.usable("p")
    await slots_free(d)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_sender_that_dies_or_stands_still_in_any_state(number: signal.Signals) -> None:
    d = Front([make_carrier("nccl")], instance="d")
    async with started(d), child("prefill") as sender:
        endpoint = await sender.line()
        transfers = [receiving(d, blocks) for blocks in (IDLE, FLOWING)]
        tasks = [asyncio.create_task(t.run(endpoint, frame_s=30)) for t in transfers]
        await asyncio.gather(*(t.running.wait() for t in transfers))
        await flowing(transfers)
        sender.signal(number)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, PeerLost) for result in results), results
        await d.all_slots_free()


def test_carrier_is_offered_on_a_trusted_network_alone() -> None:
    assert NcclCarrier(trusted=False).offer("127.0.0.1:1") is None
    assert NcclCarrier(trusted=True).offer("127.0.0.1:1")
    offer = pb.CarrierOffer(name="nccl", address="gloo/" + "0" * 32)
    session = SimpleNamespace(alive=True)
    assert NcclCarrier(trusted=False).accept(offer, session) is None  # type: ignore[arg-type]
    assert NcclCarrier(trusted=True).accept(offer, session)  # type: ignore[arg-type]
    offer.address = "nccl/" + "0" * 32
    assert NcclCarrier(trusted=True).accept(offer, session) is None  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="gloo only"):
        NcclCarrier(trusted=True, backend="nccl")
