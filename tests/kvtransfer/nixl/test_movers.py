"""KV slots are read through NIXL by real movers, which may die or stand still at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvtransfer.nixl.messages import TOKEN_BYTES, MoverAddress
from kvtransfer.nixl.mover import PROBE_S, STUCK_S
from kvtransfer.nixl.mover_process import SILENT_S
from protocol.errors import CarrierFailed, TransferFailed
from tests.kvtransfer.nixl.movers import SHAPE, TRANSPORTS, ignore_silence, mover_pair, pid

DATA = bytes(range(256)) * (SHAPE.slot_bytes // 256)
PROMPT_S = 4.0  # for what is noticed at once, on a busy machine


@pytest.mark.parametrize("transport", list(TRANSPORTS))
async def test_slots_are_read_in_parallel(transport: str) -> None:
    async with mover_pair(transport) as pair:
        sent = [bytes([i]) * SHAPE.slot_bytes for i in range(8)]
        for i, data in enumerate(sent):
            pair.serving.fill(SHAPE.inbound + i, data)
        reader, address, peer = await pair.connect()
        for _ in range(8):  # 64 reads, of which 8 are for each slot
            pair.reading.arena.view[:] = bytes(SHAPE.bytes)
            reads = [
                reader.read(peer, address.locate(SHAPE.inbound + i, len(data)), i, len(data))
                for i, data in enumerate(sent)
            ]
            await asyncio.gather(*reads)
            assert [pair.reading.content(i, SHAPE.slot_bytes) for i in range(8)] == sent
        assert reader.reads_done == 64


async def test_killed_server_fails_the_read_and_the_next_one_is_served() -> None:
    async with mover_pair("tcp") as pair:
        await pair.copy(DATA)
        reader, address, peer = await pair.connect()
        server = await pair.servers.wait_ready(pair.serving.engine)
        os.kill(pid(server), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(CarrierFailed):
            while time.monotonic() < began + STUCK_S:  # a process takes a moment to die
                await reader.read(peer, address.locate(SHAPE.inbound, 4096), 0, 4096)
        assert time.monotonic() < began + PROMPT_S
        await reader.gone()
        await pair.copy_again(DATA[::-1])


async def stop(process: int) -> None:
    """Stop a process, and return once all of its threads stand still."""
    os.kill(process, signal.SIGSTOP)
    async with asyncio.timeout(PROMPT_S):
        for thread in psutil.Process(process).threads():  # of which each has an id of its own
            while psutil.Process(thread.id).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.001)


async def test_stopped_server_fails_the_read_within_the_deadline() -> None:
    async with mover_pair("tcp") as pair:
        await pair.copy(DATA)
        reader, address, peer = await pair.connect()
        server = await pair.servers.wait_ready(pair.serving.engine)
        ignore_silence(server)
        await stop(pid(server))
        began = time.monotonic()
        reads = [
            asyncio.create_task(
                reader.read(peer, address.locate(SHAPE.inbound, len(DATA)), i, len(DATA))
            )
            for i in range(4)
        ]
        await asyncio.wait(reads)
        assert all(isinstance(read.exception(), CarrierFailed) for read in reads)
        assert STUCK_S <= time.monotonic() - began < STUCK_S + PROMPT_S
        await reader.gone()
        # Nothing is written any more, although what was asked for is sent now.
        pair.reading.arena.view[:] = bytes(SHAPE.bytes)
        os.kill(pid(server), signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert not any(pair.reading.arena.view)
        await pair.copy_again(DATA)


async def test_stopped_server_is_found_when_connecting() -> None:
    async with mover_pair("tcp") as pair:
        server = await pair.servers.wait_ready(pair.serving.engine)
        await pair.readers.wait_ready(pair.reading.engine)
        ignore_silence(server)
        os.kill(pid(server), signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(CarrierFailed, match="cannot reach"):
            await pair.connect()
        assert PROBE_S <= time.monotonic() - began < PROBE_S + PROMPT_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_reader_fails_every_read_and_is_replaced(number: signal.Signals) -> None:
    async with mover_pair("tcp") as pair:
        await pair.copy(DATA)
        reader, address, peer = await pair.connect()
        began = time.monotonic()
        reads = [
            asyncio.create_task(
                reader.read(peer, address.locate(SHAPE.inbound, len(DATA)), i % 8, len(DATA))
            )
            for i in range(64)
        ]
        await asyncio.sleep(0.001)
        os.kill(pid(reader), number)
        await asyncio.wait(reads)
        errors = [read.exception() for read in reads]
        assert errors[-1] is not None
        assert all(error is None or isinstance(error, TransferFailed) for error in errors)
        assert time.monotonic() - began < SILENT_S + PROMPT_S
        await reader.gone()
        await pair.copy_again(DATA)


async def test_places_that_are_not_served_are_refused() -> None:
    async with mover_pair("tcp") as pair:
        reader, address, peer = await pair.connect()
        with pytest.raises(TransferFailed, match="slot 0"):
            address.locate(0, 16)  # an inbound slot of the other worker
        with pytest.raises(TransferFailed, match="slot 16"):
            address.locate(16, 16)
        with pytest.raises(TransferFailed):
            address.locate(SHAPE.inbound, SHAPE.slot_bytes + 1)
        region_end = address.slots_at + address.slots * address.stride
        for remote in (address.slots_at - 4096, region_end - 100, region_end, 4096):
            with pytest.raises(CarrierFailed):
                await reader.read(peer, remote, 0, 200)
        assert reader.alive  # a read that is refused has written nothing
        await pair.copy(DATA)


async def test_reader_that_is_not_the_one_meant_is_refused() -> None:
    async with mover_pair("tcp") as pair:
        server = await pair.servers.wait_ready(pair.serving.engine)
        reader = await pair.readers.wait_ready(pair.reading.engine)
        good = server.address()
        wrong = [
            (bytes(TOKEN_BYTES), good.metadata, good.probe),  # another token
            (good.token, good.metadata, good.slots_at),  # its memory does not hold the token
            (good.token, good.metadata[: len(good.metadata) // 2], good.probe),
            (good.token, b"\0" * 100, good.probe),
        ]
        for token, metadata, probe in wrong:
            address = MoverAddress(token, metadata, probe, *good_slots(good))
            with pytest.raises(TransferFailed):
                reader = await pair.readers.wait_ready(pair.reading.engine)
                await reader.peers.acquire(address)
            await reader.lost_within(0.1)  # the library may end its process on malformed metadata
            await asyncio.sleep(0)
        assert reader.alive
        # The library keeps the part of malformed metadata that it has understood, under the name
        # of their agent. A worker harms itself alone so, until its mover has another name.
        server.end("the test wants another one")
        await server.gone()
        await pair.copy(DATA)
        assert reader is await pair.readers.wait_ready(pair.reading.engine)


def good_slots(address: MoverAddress) -> tuple[int, int, int, int]:
    return address.slots_at, address.first_slot, address.slots, address.stride


async def test_movers_end_with_their_engine() -> None:
    async with mover_pair("tcp") as pair:
        await pair.copy(DATA)
        server = await pair.servers.wait_ready(pair.serving.engine)
        pair.serving.end()
        assert await server.lost_within(PROMPT_S)
        await server.gone()
        with pytest.raises(CarrierFailed, match="has ended"):
            await pair.servers.wait_ready(pair.serving.engine)


def is_running(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("stopped", [False, True])
async def test_movers_die_with_their_front(stopped: bool) -> None:
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvtransfer.nixl.movers", stdout=asyncio.subprocess.PIPE
    )
    assert front.stdout is not None
    async with asyncio.timeout(20):
        mover = int(await front.stdout.readline())
        if stopped:
            os.kill(mover, signal.SIGSTOP)
        front.kill()
        await front.wait()
        while is_running(mover):
            await asyncio.sleep(0.02)


async def test_mover_that_cannot_start_says_why_and_is_not_tried_again_at_once() -> None:
    async with mover_pair("tcp") as pair:
        broken = type(pair.readers)(
            [*pair.readers._command[:-1], "no_such_library"], pair.readers._region, os.environ
        )
        with pytest.raises(CarrierFailed, match="no_such_library"):
            await broken.wait_ready(pair.reading.engine)
        await asyncio.sleep(0.1)
        assert not broken.may_serve()
        with pytest.raises(CarrierFailed, match="a moment ago"):
            await broken.wait_ready(pair.reading.engine)
        await broken.close()
