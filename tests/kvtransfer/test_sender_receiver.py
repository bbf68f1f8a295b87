"""KV server and KV client over a real socket, without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine.ipc.messages import KVFrame
from engine.kv_cache.kv_format import KVPiece
from kvtransfer.frames import ExpectedFrames
from kvtransfer.receiver import KVClient, KVPull
from kvtransfer.sender import KVServer
from protocol.errors import StartupError, TransferFailed

TOKEN = "t" * 32
SIZE = 1000
PIECES = [KVPiece(0, 2, block, 1) for block in range(5)]


class TransferEnds:
    """A KV server and a KV client, each with slots of its own."""

    def __init__(self, token: str = TOKEN) -> None:
        self.server = KVServer(TOKEN)
        self.endpoint = self.server.start("127.0.0.1", 0)
        self.client = KVClient(token)
        self.sent = [bytearray(2 * SIZE) for _ in range(5)]
        self.got = [bytearray(2 * SIZE) for _ in range(5)]
        self.arrived: list[tuple[int, KVPiece, int]] = []
        self.released: list[int] = []

    def offer(self, transfer: bytes, pieces: list[KVPiece]) -> None:
        outlet = self.server.open(transfer, lambda slot, n: memoryview(self.sent[slot])[:n])
        for i, piece in enumerate(pieces):
            self.sent[i][:] = bytes([65 + i]) * (2 * SIZE)
            frame = KVFrame(1, i, i, piece, piece.bytes(SIZE), last=i == len(PIECES) - 1)
            outlet.put(frame, lambda i=i: self.released.append(i))  # type: ignore[misc]

    def pull(self, transfer: bytes, slots: int) -> KVPull:
        expected = ExpectedFrames(transfer, PIECES, SIZE)
        pull = self.client.open(
            self.endpoint,
            expected,
            lambda slot, n: memoryview(self.got[slot])[:n],
            lambda *arrived: self.arrived.append(arrived),
        )
        for slot in range(slots):
            pull.add_slot(slot)
        return pull

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def ends() -> Iterator[TransferEnds]:
    both = TransferEnds()
    yield both
    both.close()


async def test_frames_arrive_whole_and_slots_go_back(ends: TransferEnds) -> None:
    ends.offer(b"a" * 16, PIECES)
    await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"a" * 16, 5)), 10)
    assert [piece for _, piece, _ in ends.arrived] == PIECES
    assert ends.got == ends.sent
    assert ends.released == [0, 1, 2, 3, 4]


async def test_a_frame_without_a_credit_ends_the_transfer(ends: TransferEnds) -> None:
    ends.offer(b"a" * 16, PIECES)
    with pytest.raises(TransferFailed, match="without a credit"):
        await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"a" * 16, 2)), 10)
    assert len(ends.arrived) == 2


async def test_pieces_in_another_order_end_the_transfer(ends: TransferEnds) -> None:
    ends.offer(b"a" * 16, PIECES[::-1])
    with pytest.raises(TransferFailed, match="due was"):
        await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"a" * 16, 5)), 10)
    assert ends.arrived == []


async def test_an_unknown_transfer_and_a_second_pull_are_refused(ends: TransferEnds) -> None:
    with pytest.raises(TransferFailed, match="NOT_FOUND"):
        await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"x" * 16, 1)), 10)
    ends.offer(b"a" * 16, PIECES)
    await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"a" * 16, 5)), 10)
    with pytest.raises(TransferFailed, match="NOT_FOUND"):
        await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"a" * 16, 5)), 10)


async def test_without_the_token_nothing_is_served() -> None:
    ends = TransferEnds(token="wrong")
    try:
        ends.offer(b"a" * 16, PIECES)
        with pytest.raises(TransferFailed, match="UNAUTHENTICATED"):
            await asyncio.wait_for(ends.client.read_to_end(ends.pull(b"a" * 16, 5)), 10)
    finally:
        ends.close()


async def test_a_cancelled_pull_returns_soon(ends: TransferEnds) -> None:
    ends.offer(b"a" * 16, PIECES[:2])  # the rest never comes
    pull = ends.pull(b"a" * 16, 5)
    task = asyncio.create_task(ends.client.read_to_end(pull))
    while len(ends.arrived) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    async with asyncio.timeout(2):
        await asyncio.wait([task])
    assert task.cancelled()
    assert sorted(pull.unused_slots()) == [2, 3, 4]


def test_only_loopback() -> None:
    with pytest.raises(StartupError, match="loopback"):
        KVServer(TOKEN).start("0.0.0.0", 0)
