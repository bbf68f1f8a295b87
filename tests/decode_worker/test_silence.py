"""How long a sender may be silent: the clock runs from when a frame is due and can come."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.handover import FRAME_S
from engine.kv_cache.kv_format import Codec, split_into_pieces
from kvtransfer import inbound as module
from kvtransfer.credits import CreditWindow
from kvtransfer.frames import TRANSFER_BYTES, ExpectedFrames
from kvtransfer.inbound import OWN_S, InboundTransfer
from protocol.errors import CarrierFailed, NoPages

BLOCK_BYTES = 1000


class World:
    """One transfer of ten blocks over a carrier that brings nothing, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slots: int) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "CreditWindow", partial(CreditWindow, clock=lambda: self.now))
        monkeypatch.setattr(module, "_CHECK_S", 0.001)
        self.slots = slots
        shared = SimpleNamespace(
            add=self._add, remove=lambda window: None, release=lambda slots: None,
            serve=lambda: None,
        )  # fmt: skip
        links = SimpleNamespace(known_bytes_s=lambda instance, name: None)
        traffic = SimpleNamespace(count_failure=lambda carrier, codec: None)
        session = SimpleNamespace(arena=SimpleNamespace(slot=lambda slot, nbytes: memoryview(b"")))
        context: Any = SimpleNamespace(session=session, slots=shared, links=links, traffic=traffic)
        carrier: Any = SimpleNamespace(name="tcp", needs_slots=True)
        link: Any = SimpleNamespace(receive=lambda received: None, close=self._close)
        pieces = split_into_pieces(0, 10, 1, BLOCK_BYTES, BLOCK_BYTES)
        sizes = [piece.bytes(BLOCK_BYTES) for piece in pieces]
        expected = ExpectedFrames(bytes(TRANSFER_BYTES), pieces, sizes, Codec.RAW)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.inbound = InboundTransfer(
            context, "p", 1, carrier, link, expected, lambda frames: None, over
        )
        self.task: asyncio.Task[None] | None = None

    def _add(self, window: CreditWindow, on_granted: Any) -> None:
        for slot in range(self.slots):
            window.grant()
            on_granted(slot)

    async def _close(self) -> None:
        pass

    async def run(self) -> None:
        self.task = asyncio.create_task(self.inbound.run(FRAME_S))
        await asyncio.sleep(0)

    async def runs_at(self, now: float) -> bool:
        """Advance the clock; return whether the transfer still goes on after some checks."""
        assert self.task is not None
        self.now = now
        await asyncio.sleep(0.02)
        return not self.task.done()


async def test_prompt_that_queued_for_long_does_not_fail_after_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, slots=1)
    await world.run()
    assert await world.runs_at(110.0)  # it has a credit and waits for its turn
    world.inbound.frames_due()  # the first token
    assert await world.runs_at(110.5)
    assert await world.runs_at(110.0 + FRAME_S - 0.1)
    assert not await world.runs_at(110.0 + FRAME_S + 0.1)
    assert world.task is not None
    with pytest.raises(CarrierFailed, match=f"no KV frame for {FRAME_S:g} s"):
        await world.task


async def test_wait_for_pages_counts_neither_as_silence_nor_as_a_wait_for_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, slots=0)
    world.inbound.frames_due()
    world.now += 19.0  # until this worker has pages
    await world.run()
    assert await world.runs_at(119.0 + OWN_S - 0.1)
    assert not await world.runs_at(119.0 + OWN_S + 0.1)  # a waiting transfer has a deadline, too
    assert world.task is not None
    with pytest.raises(NoPages):
        await world.task
