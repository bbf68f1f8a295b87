"""KV that arrives in the pool of an engine process under decode.

64 sequences decode while a front sends frames at a fixed rate, for sequences that never join. The
engine is the product's process, driven over socket and arena (bench/gpu/front.py). Its steps are
timed in its own process.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.gpu.front import EngineFront, front_settings, write_folder
from bench.gpu.models import pages_of, random_request, shape_of
from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median, percentile
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request

STEADY_AIM = 1 / 1.1
"""Ratio of the median step to the 99th percentile that is aimed at while KV arrives."""

TICK_S = 0.0005
AROUND = 25
"""Steps before and after a step that it is compared with."""


@dataclass(frozen=True)
class ArrivalSizes:
    batch: int  # sequences that decode
    context: int  # tokens of each
    new_tokens: int  # of each: none ends while steps are timed
    arriving: int  # tokens of each sequence whose KV arrives
    seconds: float  # of each period
    rate: float  # bytes per second


FULL = ArrivalSizes(64, 2048, 6144, 4096, 5.0, 5e9)
TINY = ArrivalSizes(3, 64, 4096, 128, 0.4, 2e6)


def sizes_of(context: PartContext) -> ArrivalSizes:
    return TINY if context.tiny else FULL


def request_of(context: PartContext, seed: int, length: int, new_tokens: int) -> Request:
    """Return a greedy request that shares no prefix with another one."""
    return random_request(int(shape_of(context)["vocab_size"]), seed, length, new_tokens)


def measure_arrival(context: PartContext) -> None:
    """Measure the part ``kv``."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure_arrival(context, write_folder(Path(folder), shape_of(context))))


async def _measure_arrival(context: PartContext, folder: Path) -> None:
    sizes = sizes_of(context)
    longest = max(sizes.context, sizes.arriving) + sizes.new_tokens
    pages = pages_of(sizes.batch, sizes.context + sizes.new_tokens)
    pages += 4 * pages_of(1, sizes.arriving)
    front = EngineFront(
        front_settings(
            folder,
            "decode",
            str(context.device),
            max_batch=sizes.batch,
            prefill_chunk=512,
            max_model_len=longest,
            kv_tokens=pages * BLOCK_TOKENS,
        )
    )
    try:
        await front.open()
        for seed in range(sizes.batch):
            request = request_of(context, seed, sizes.context, sizes.new_tokens)
            await front.decode_without_kv(request)
        await asyncio.sleep(sizes.seconds / 4)  # the batch is complete, and warm
        before = await _step_times(front, sizes.seconds)
        arrival = KVArrival(context, front)
        feeding = asyncio.create_task(arrival.run())
        await asyncio.sleep(sizes.seconds / 4)
        sent = arrival.sent
        busy = await _step_times(front, sizes.seconds)
        rate = (arrival.sent - sent) / sizes.seconds
        feeding.cancel()
        await asyncio.sleep(sizes.seconds / 4)
        after = await _step_times(front, sizes.seconds)
        _add_arrival(context, (before, after), busy, rate)
    finally:
        front.close()


async def _step_times(front: EngineFront, seconds: float) -> list[float]:
    """Return the seconds of the steps that end within the next ``seconds``."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    ends = front.step_ends(began, time.monotonic())
    return [b - a for a, b in pairwise(ends)]


def _add_arrival(
    context: PartContext, quiet: Sequence[Sequence[float]], busy: Sequence[float], rate: float
) -> None:
    """Add the rows of the steps before and after the arrival, ``quiet``, and of those under it."""
    sizes = sizes_of(context)
    at = f"decode, batch {sizes.batch}, context {sizes.context}, own process"
    # The context grows meanwhile, so that the steps before and after enclose those under KV.
    alone, middle = sum(map(median, quiet)) / len(quiet), median(busy)
    alone_late = max(map(late_ratio, quiet))
    late = late_ratio(busy)
    offered = f"offered {sizes.rate / 1e9:.3g} GB/s"
    context.add(
        GpuResult(at, alone * 1e3, "ms", f"p99 {alone_late:.3f} of the median"),
        GpuResult("KV that arrives under it", rate / 1e9, "GB/s", offered, rate / sizes.rate, 0.95),
        GpuResult(f"{at}, under KV", middle * 1e3, "ms", "without KV", alone / middle),
        GpuResult(f"{at}, p99 under KV", late, "x median", "the median", 1 / late, STEADY_AIM),
    )


def late_ratio(times: Sequence[float], around: int = AROUND) -> float:
    """Return the 99th percentile of the ratio of a step's time to the median of the steps around
    it: contexts grow while steps are timed, and later steps take longer."""
    ratios = [
        taken / median(times[max(0, i - around) : i + around + 1]) for i, taken in enumerate(times)
    ]
    return percentile(ratios, 0.99)


class KVArrival:
    """Sends frames to an engine at a fixed rate, for one sequence after the other. None of them
    joins, so that the batch does not change. The frames hold zeros, which are valid KV."""

    def __init__(self, context: PartContext, front: EngineFront) -> None:
        assert front.session.ready is not None
        self._context = context
        self._front = front
        self._kv = front.session.ready.kv
        self.sent = 0  # bytes
        self._seeds = iter(range(10_000, 1_000_000))

    async def run(self) -> None:
        """Send until cancelled. The next sequence is opened while frames of the last are sent."""
        began, due = time.monotonic(), 0.0
        opening = asyncio.create_task(self._open())
        while True:
            handle, pieces = await opening
            opening = asyncio.create_task(self._open())
            try:
                while pieces:
                    due = sizes_of(self._context).rate * (time.monotonic() - began)
                    # What could not be sent in time is not made up for later.
                    began += max(0.0, due - self.sent - self._most) / sizes_of(self._context).rate
                    while pieces and self.sent < due and self._front.session.inbound:
                        self._send(handle, pieces.popleft())
                    await asyncio.sleep(TICK_S)
                self._front.drop(handle)
            except asyncio.CancelledError:
                opening.cancel()
                raise

    @property
    def _most(self) -> int:
        """Bytes that may be caught up with: those of all slots."""
        shape = self._front.session.arena.shape
        return shape.slot_bytes * shape.inbound

    async def _open(self) -> tuple[int, deque[KVPiece]]:
        length = sizes_of(self._context).arriving
        request = request_of(self._context, next(self._seeds), length, 1)
        handle, _ = await self._front.receive(request)
        size = self._kv.block_layer_bytes(Codec.FP8)
        frame = self._front.session.arena.shape.slot_bytes
        blocks = length // BLOCK_TOKENS
        return handle, deque(split_into_pieces(0, blocks, self._kv.layers, size, frame))

    def _send(self, handle: int, piece: KVPiece) -> None:
        nbytes = piece.bytes(self._kv.block_layer_bytes(Codec.FP8))
        slot = self._front.session.inbound.pop()
        self._front.session.send_slot(m.Ingest(handle, 0, slot, piece, nbytes, Codec.FP8))
        self.sent += nbytes
