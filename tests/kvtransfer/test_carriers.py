"""Every carrier brings every frame whole, or says why not, and gives each slot back.

The fronts are real, with their control call; the engines are fake. ``CARRIERS`` names the carriers
that this suite covers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cluster.credentials import certificates
from kvtransfer.carrier import InboundLink, InboundRequest
from kvtransfer.carriers.tcp_carrier import TcpCarrier
from kvtransfer.carriers.tcp_connection import TcpConnection
from kvtransfer.prefill_call import PrefillRunCall
from protocol.endpoints.grpc_endpoints import EndpointSecurity
from protocol.errors import CarrierFailed, PeerLost, StartupError, TransferFailed
from protocol.requests import request_to_wire
from protocol.security.tls import TlsFiles
from protocol.wire import wire_pb2 as pb
from tests.kvtransfer.fake_engine import READY, SLOT_BYTES
from tests.kvtransfer.front_process import (
    FLOWING,
    IDLE,
    child,
    endless_prefill_front,
    flowing,
)
from tests.kvtransfer.fronts import (
    CARRIERS,
    Front,
    Receiving,
    a_request,
    make_carrier,
    receiving,
    started,
)

STREAMS = ("grpc", "tcp")
NAME = "baton.cluster"

Pair = tuple[Front, Front]


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture
async def pair(carrier: str) -> AsyncIterator[Pair]:
    """A sending and a receiving front."""
    p, d = Front([make_carrier(carrier)]), Front([make_carrier(carrier)], instance="d")
    async with started(p, d):
        yield p, d


async def received(pair: Pair, blocks: int = 40) -> Receiving:
    p, d = pair
    transfer = receiving(d, blocks)
    async with asyncio.timeout(10):
        await transfer.run(p.endpoint)
    return transfer


async def slots_free(*fronts: Front) -> None:
    await asyncio.gather(*(front.all_slots_free() for front in fronts))


async def test_frames_arrive_whole_and_slots_go_back(pair: Pair, carrier: str) -> None:
    for blocks in (40, 1, 39):  # the second and third go over connections that are kept
        transfer = await received(pair, blocks)
        assert transfer.complete and transfer.carrier == carrier
        await slots_free(*pair)
    (row,) = pair[1].receiver.links.rows()
    assert (row.carrier, row.transfers, row.failures) == (carrier, 3, 0)
    counted = pair[1].receiver.traffic
    assert {name for name, _ in counted.by_carrier} == {carrier}


async def test_cached_blocks_are_fetched(pair: Pair) -> None:
    p, d = pair
    transfer = receiving(d, cached_only=True)
    await transfer.run(p.endpoint)
    assert transfer.complete
    await slots_free(p, d)


async def test_frames_in_any_order_are_taken(pair: Pair) -> None:
    pair[0].engine.faults.reverse = True
    assert (await received(pair)).complete
    await slots_free(*pair)


async def test_a_frame_that_comes_twice_ends_the_transfer(pair: Pair) -> None:
    pair[0].engine.faults.twice = True
    with pytest.raises(TransferFailed, match="twice"):
        await received(pair)
    await slots_free(*pair)


async def test_a_frame_with_another_piece_ends_the_transfer(pair: Pair) -> None:
    pair[0].engine.faults.piece = True
    with pytest.raises(TransferFailed, match="due was"):
        await received(pair)
    assert not pair[1].receiver.links.rows()[0].avoided_s, "the link is not at fault"
    await slots_free(*pair)


async def test_a_wrong_checksum_is_noticed_before_a_page_is_written(pair: Pair) -> None:
    pair[0].engine.faults.checksum = True
    with pytest.raises(TransferFailed, match="checksum"):  # of ``local`` the engine's
        await received(pair)
    assert not any(pair[1].engine.written.values())
    await slots_free(*pair)


@pytest.mark.parametrize("carrier", ["local"], indirect=True)
async def test_a_slot_that_is_filled_again_under_a_late_reader_is_noticed(pair: Pair) -> None:
    pair[0].engine.faults.refill = True
    with pytest.raises(TransferFailed, match="the slot has other content"):
        await received(pair)
    await slots_free(*pair)


@pytest.mark.parametrize("carrier", STREAMS)
async def test_a_frame_without_a_credit_ends_the_transfer(carrier: str) -> None:
    p, d = Front([make_carrier(carrier)], 32), Front([make_carrier(carrier)], 2, instance="d")
    async with started(p, d):
        p.engine.faults.unasked = True
        with pytest.raises(TransferFailed, match="without a credit"):
            await received((p, d), 400)
        await slots_free(p, d)


async def test_64_transfers_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.prefill_call.ACCEPT_S", 20.0)  # of a machine that is busy
    p, d = pair
    transfers = [receiving(d, 30 + i % 3, cached_only=i % 4 == 0) for i in range(64)]
    async with asyncio.timeout(20):
        await asyncio.gather(*(transfer.run(p.endpoint) for transfer in transfers))
    assert all(transfer.complete for transfer in transfers)
    await slots_free(p, d)


async def test_a_cancelled_transfer_returns_soon(pair: Pair) -> None:
    p, d = pair
    p.engine.faults.held_back = 2
    transfer = receiving(d)
    task = asyncio.create_task(transfer.run(p.endpoint))
    await flowing([transfer])
    task.cancel()
    async with asyncio.timeout(1.5):
        await asyncio.wait([task])
    assert task.cancelled()
    await slots_free(p, d)
    p.engine.faults.held_back = 0
    assert (await received(pair)).complete


async def test_silence_counts_from_the_first_frame_that_is_due(pair: Pair) -> None:
    p, d = pair
    p.engine.computes = lambda blocks: False
    p.engine.faults.held_back = 2
    transfer = receiving(d)
    task = asyncio.create_task(transfer.run(p.endpoint, frame_s=0.4))
    await transfer.running.wait()
    await asyncio.sleep(0.8)
    assert not task.done(), "the prompt still waits in the queue"
    p.engine.compute(next(iter(p.engine.offers)))
    with pytest.raises(CarrierFailed, match=r"no KV frame for 0\.4 s"):
        async with asyncio.timeout(2):
            await task
    assert not d.receiver.links.usable("p"), "another carrier, or another worker, is tried first"
    await slots_free(p, d)


async def test_a_link_that_stands_still_is_avoided_whichever_end_notices_it(
    pair: Pair, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_worker.service.FRAME_SEND_S", 0.5)
    p, d = pair
    used = d.receiver.context().carriers[carrier]
    connect = used.connect

    def connect_deaf(request: InboundRequest) -> InboundLink:
        link = connect(request)
        monkeypatch.setattr(link, "receive", lambda frames: None)
        monkeypatch.setattr(link, "on_filled", lambda slots: None)
        return link

    monkeypatch.setattr(used, "connect", connect_deaf)
    # The few frames of this test fit into the kernel's buffers, so only the receiver notices.
    frame_s, noticed = (0.5, "no KV frame") if carrier == "tcp" else (5.0, "read no KV")
    with pytest.raises(CarrierFailed, match=rf"{noticed} for 0\.5 s"):
        async with asyncio.timeout(5):
            await receiving(d).run(p.endpoint, frame_s=frame_s)
    assert not d.receiver.links.usable("p"), "another carrier is tried first"
    await slots_free(p, d)


async def test_a_receiver_that_reads_nothing_loses_its_transfer(
    pair: Pair, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grants credits, and then stands still; its call goes on."""
    monkeypatch.setattr("prefill_worker.service.FRAME_SEND_S", 0.5)
    p, d = pair
    call = d.receiver.context().channels.open_call(p.endpoint)
    await call.write(pb.PrefillCall(start=start_message(d, carrier)))
    await call.write(pb.PrefillCall(credits=5))
    with pytest.raises(grpc.aio.AioRpcError, match=r"read no KV for 0\.5 s"):
        async with asyncio.timeout(5):
            while await call.read():
                pass
    await slots_free(p)


def start_message(front: Front, carrier: str) -> pb.PrefillStart:
    """A call for 40 blocks by one carrier."""
    address = front.carriers[0].offer("127.0.0.1:1") or ""
    offer = pb.CarrierOffer(name=carrier, address=address, frame_bytes=SLOT_BYTES)
    return pb.PrefillStart(
        request=request_to_wire(a_request(1, 40)),
        instance="p",
        transfer="ab" * 16,
        model=READY.kv_identity,
        carriers=[offer],
    )


@pytest.mark.parametrize("carrier", ["local"], indirect=True)
@pytest.mark.parametrize("sequences", [[7], [0, 0]])
async def test_frames_that_were_not_to_be_taken_end_the_call(
    pair: Pair, sequences: list[int]
) -> None:
    p, d = pair
    call = d.receiver.context().channels.open_call(p.endpoint)
    await call.write(pb.PrefillCall(start=start_message(d, "local")))
    await call.write(pb.PrefillCall(credits=1))
    while not (isinstance(said := await call.read(), pb.PrefillEvent) and said.HasField("filled")):
        pass
    taken = pb.PrefillCall.Taken(sequences=sequences)
    await call.write(pb.PrefillCall(taken=taken))
    with pytest.raises(grpc.aio.AioRpcError, match="was taken, and no slot holds it"):
        async with asyncio.timeout(5):
            while await call.read():
                pass
    await slots_free(p)


async def test_who_has_a_wrong_token_gets_no_kv(carrier: str) -> None:
    p, d = Front([make_carrier(carrier)]), Front([make_carrier(carrier, "wrong")], instance="d")
    async with started(p, d):
        with pytest.raises(CarrierFailed):
            async with asyncio.timeout(5):
                await receiving(d).run(p.endpoint)
        await slots_free(p, d)


@pytest.mark.parametrize("carrier", STREAMS, indirect=True)
async def test_unknown_transfers_and_second_pulls_are_refused(pair: Pair) -> None:
    p, d = pair
    p.engine.faults.held_back = 2
    transfer = receiving(d)
    calls: list[PrefillRunCall] = []
    transfer.on_call = calls.append
    task = asyncio.create_task(transfer.run(p.endpoint, frame_s=60))
    await flowing([transfer])
    for forged in (calls[0]._transfer, b"x" * 16):
        second = receiving(d)
        second.on_call = _pulls(forged)
        with pytest.raises(CarrierFailed):
            await second.run(p.endpoint)
    assert not task.done(), "the first pull goes on"
    task.cancel()
    await asyncio.wait([task])
    await slots_free(p, d)


def _pulls(transfer: bytes) -> Callable[[PrefillRunCall], None]:
    """Make a call pull another transfer than its own."""

    def change(call: PrefillRunCall) -> None:
        connect = call._connect

        def changed(*arguments: object) -> None:
            call._transfer = transfer
            connect(*arguments)  # type: ignore[arg-type]

        call._connect = changed  # type: ignore[method-assign, assignment]

    return change


async def test_another_engine_has_another_arena(pair: Pair) -> None:
    p, d = pair
    assert (await received(pair)).complete
    p.engine.faults.held_back = 2
    transfer = receiving(d)
    task = asyncio.create_task(transfer.run(p.endpoint))
    await flowing([transfer])
    p.replace_engine()
    with pytest.raises(PeerLost):
        async with asyncio.timeout(5):
            await task
    assert (await received(pair)).complete
    d.replace_engine()
    assert (await received(pair)).complete
    async with asyncio.timeout(5):  # until the old arenas are unmapped
        while len(d.engine.peers) > 1:
            await asyncio.sleep(0.05)
    await slots_free(p, d)


@pytest.mark.parametrize("answers", ["nothing", "garbage", "the end"])
async def test_who_answers_wrong_or_never_costs_one_attempt(
    pair: Pair, carrier: str, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    address, server = await impostor(carrier, answers)
    monkeypatch.setattr(p.carriers[0], "accept", lambda offer, session: address)
    p.engine.computes = lambda blocks: carrier == "grpc"  # it connects when frames are due
    with pytest.raises(CarrierFailed):
        async with asyncio.timeout(4.5):
            await receiving(d).run(p.endpoint)
    assert not d.receiver.links.usable("p")
    server.close()
    await slots_free(p, d)


async def impostor(carrier: str, answers: str) -> tuple[str, asyncio.Server]:
    """Listen where a carrier is said to be, and return its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answers == "nothing":
            await asyncio.sleep(6)
        elif answers == "garbage":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
            await writer.drain()
        writer.close()

    if carrier == "local":
        return await local_impostor(answers)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return str(server.sockets[0].getsockname()[1]), server


async def local_impostor(answers: str) -> tuple[str, asyncio.Server]:
    from kvtransfer.carriers import local_sockets

    name = f"baton-{os.urandom(16).hex()}"
    listener = local_sockets.listen(name)
    loop = asyncio.get_running_loop()

    def accept() -> None:
        sock, _ = listener.accept()
        if answers == "garbage":
            sock.send(b"garbage")
        if answers == "nothing":
            loop.call_later(6, sock.close)
        else:
            sock.close()

    loop.add_reader(listener.fileno(), accept)

    class Server:
        def close(self) -> None:
            loop.remove_reader(listener.fileno())
            listener.close()

    return f"{name}/1", Server()  # type: ignore[return-value]


@pytest.mark.parametrize("address", ["", "0", "65536", "-1", "x" * 100, "²", "1" * 5000])
async def test_an_address_that_is_none_is_refused(
    pair: Pair, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    monkeypatch.setattr(p.carriers[0], "accept", lambda offer, session: address)
    with pytest.raises(CarrierFailed):
        await receiving(d).run(p.endpoint)
    await slots_free(p, d)


# ---- other processes ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_stands_still_in_any_state(number: signal.Signals) -> None:
    fronts = [Front([make_carrier(name)], instance="d") for name in CARRIERS]
    async with started(*fronts), child("prefill") as sender:
        endpoint = await sender.line()
        transfers = [receiving(front, blocks) for front in fronts for blocks in (IDLE, FLOWING)]
        tasks = [asyncio.create_task(t.run(endpoint, frame_s=30)) for t in transfers]
        await asyncio.gather(*(t.running.wait() for t in transfers))
        await flowing(transfers)
        sender.signal(number)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, PeerLost) for result in results), results
        await slots_free(*fronts)


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 4.0), (signal.SIGSTOP, 16.0)])
async def test_a_receiver_that_dies_or_stands_still_keeps_no_slot(
    number: signal.Signals, within_s: float
) -> None:
    p = endless_prefill_front()
    async with started(p), child("decode", p.endpoint) as receiver:
        assert await receiver.line() == "receiving"
        assert len(p.engine.outbound) < p.engine.arena.shape.outbound
        receiver.signal(number)
        await p.all_slots_free(within_s)
        async with asyncio.timeout(within_s):
            while p.service.calls:
                await asyncio.sleep(0.01)


# ---- TLS ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificates of a cluster, and of another one."""
    made = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    for folder in made:
        certificates.create_ca(folder, [NAME])
    return made


def tls_files(folder: Path, name: str | None = NAME) -> TlsFiles:
    ca, cert, key = (str(folder / each) for each in ("ca.pem", f"{NAME}.pem", f"{NAME}.key"))
    return TlsFiles(ca=ca, cert=cert, key=key, name=name)


def tls_front(carrier: str, control: TlsFiles, files: TlsFiles, instance: str = "p") -> Front:
    """A front whose carrier may have other certificates than its control call."""
    made = make_carrier(carrier, security=EndpointSecurity(files), files=files)
    return Front([made], security=EndpointSecurity(control), instance=instance)


@pytest.mark.parametrize("carrier", STREAMS, indirect=True)
async def test_kv_travels_through_mutual_tls(carrier: str, folders: tuple[Path, Path]) -> None:
    ours = tls_files(folders[0])
    p, d = (tls_front(carrier, ours, ours, instance) for instance in "pd")
    async with started(p, d):
        for _ in range(2):
            assert (await received((p, d), 100)).complete
        transfers = [receiving(d, 30) for _ in range(16)]
        await asyncio.gather(*(transfer.run(p.endpoint) for transfer in transfers))
        assert all(transfer.complete for transfer in transfers)
        await slots_free(p, d)


@pytest.mark.parametrize("carrier", STREAMS, indirect=True)
@pytest.mark.parametrize("who", ["another CA", "another name"])
async def test_who_has_no_certificate_of_the_cluster_gets_no_kv(
    carrier: str, folders: tuple[Path, Path], who: str
) -> None:
    ours = tls_files(folders[0])
    wrong = tls_files(folders[1]) if who == "another CA" else tls_files(folders[0], name=None)
    p, d = tls_front(carrier, ours, ours), tls_front(carrier, ours, wrong, "d")
    async with started(p):  # the other one does not listen
        with pytest.raises(CarrierFailed):
            await receiving(d).run(p.endpoint)
        await slots_free(p, d)
    await d.receiver.close()
    await d.carriers[0].close()


async def test_only_loopback_without_tls(carrier: str) -> None:
    made = make_carrier(carrier)
    if carrier == "local":
        return  # it listens on no address
    with pytest.raises(StartupError, match="loopback"):
        await made.start("0.0.0.0")
    await made.close()


async def test_several_connections_share_the_frames() -> None:
    p, d = (Front([make_carrier("tcp")], slots=32, instance=i) for i in "pd")
    async with started(p, d):
        d.receiver.links.measured("p", "tcp", 9e9)
        assert d.receiver.context().connections("p", "tcp") == 4
        tcp = d.carriers[0]
        assert isinstance(tcp, TcpCarrier)

        async def transfer() -> set[TcpConnection]:
            """Return the connections that are kept after one."""
            d.receiver.links.measured("p", "tcp", 9e9)  # a busy machine may have measured less
            assert (await received((p, d), 400)).complete
            await slots_free(p, d)
            for _ in range(100):  # connections go back to the pool after their last frame
                kept = {connection for kept in tcp._pool._idle.values() for connection in kept}
                if len(kept) == 4:
                    break
                await asyncio.sleep(0.01)
            return kept

        used = [await transfer(), await transfer()]
        async with asyncio.timeout(60):  # a busy machine may end a transfer before all have opened
            while len(used[-1]) < 4 or used[-1] != used[-2]:  # until all four are used again
                used.append(await transfer())
