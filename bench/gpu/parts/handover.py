"""A hand-over between two engines on one GPU, each a process of its own.

P computes a prompt and D decodes it: the time from P's first token to D's, and the rate of a
transfer whose KV is ready. The engines are the product's processes, driven over socket and arena
(bench/gpu/front.py); a copy between the two arenas stands for the network.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.gpu.front import EngineFront, SequenceEvents, front_settings, write_folder
from bench.gpu.models import pages_of, random_request, shape_of
from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request

NEW_TOKENS = 64
"""Output tokens of a sequence that is handed over; it is dropped after a few."""

CREDITS = 64
TICK_S = 0.0005


@dataclass(frozen=True)
class HandoverSizes:
    prompts: Sequence[int]  # tokens of the prompts
    repeats: int
    chunk: int


FULL = HandoverSizes((2048, 8192), 5, 2048)
TINY = HandoverSizes((128,), 2, 64)


def sizes_of(context: PartContext) -> HandoverSizes:
    return TINY if context.tiny else FULL


def measure_handover(context: PartContext) -> None:
    """Measure the part ``handover``."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure_handover(context, write_folder(Path(folder), shape_of(context))))


async def _measure_handover(context: PartContext, folder: Path) -> None:
    sizes = sizes_of(context)
    longest = max(sizes.prompts) + NEW_TOKENS
    # Every prompt stays in the prefix cache of both, under two roots in D's.
    pages = 2 * (sizes.repeats + 2) * pages_of(len(sizes.prompts), longest)
    fronts: list[EngineFront] = []
    try:
        for role in ("prefill", "decode"):
            settings = front_settings(
                folder,
                role,
                str(context.device),
                gpu_share=0.5,
                max_batch=16,
                prefill_chunk=sizes.chunk,
                max_model_len=longest,
                kv_tokens=pages * BLOCK_TOKENS,
            )
            fronts.append(EngineFront(settings))
        for front in fronts:
            await front.open()
        for length in sizes.prompts:
            await _hand_over_prompts(context, TimedHandover(*fronts), length)
    finally:
        for front in fronts:
            front.close()


async def _hand_over_prompts(context: PartContext, pair: TimedHandover, length: int) -> None:
    vocab = int(shape_of(context)["vocab_size"])
    requests = [
        random_request(vocab, 1000 * length + repeat, length, NEW_TOKENS)
        for repeat in range(sizes_of(context).repeats + 1)
    ]
    runs = [await pair.prefill_and_decode(request) for request in requests]
    transfers = [await pair.fetch_cached(request) for request in requests]
    runs, transfers = runs[1:], transfers[1:]  # the first ones warm up
    first, gap = median([r.first_token_s for r in runs]), median([r.gap_s for r in runs])
    step = median([r.step_s for r in runs])
    rate = median([t.nbytes / t.seconds for t in transfers])
    size = runs[0].nbytes
    text = f"{size / 1e6:.4g} MB; the prompt took {first * 1e3:.4g} ms, a step {step * 1e3:.4g} ms"
    at = f"hand-over of {length} tokens"
    context.add(
        GpuResult(f"{at}: first token to the next", gap * 1e3, "ms", text, step / gap),
        GpuResult(f"{at}: KV that is ready", rate / 1e9, "GB/s"),
    )


@dataclass(frozen=True)
class HandoverTiming:
    """``gap_s`` lies between the first token, which P draws, and the second, which D draws."""

    nbytes: int
    first_token_s: float
    gap_s: float
    step_s: float  # median of D's next tokens


@dataclass(frozen=True)
class TransferTiming:
    nbytes: int
    seconds: float


class TimedHandover:
    """A prefill and a decode engine of one machine, and the copies between their arenas."""

    def __init__(self, p: EngineFront, d: EngineFront) -> None:
        self._p, self._d = p, d
        self._frame_bytes = p.session.arena.shape.slot_bytes

    async def prefill_and_decode(self, request: Request, steps: int = 8) -> HandoverTiming:
        """Compute ``request`` on P, move its KV as it is computed, and decode it on D."""
        p, d = self._p, self._d
        target, decoded = await d.receive(request)
        source, computed = p.sequence()
        began = time.monotonic()
        p.session.send(m.Prefill(source, request, self._frame_bytes, Codec.FP8))
        p.session.send_slot(m.Grant(source, CREDITS))
        await computed.wait(m.Started)
        nbytes, frames = await self._copy_frames(source, computed, target)
        first = await computed.wait_for_token()
        d.session.send(m.Join(target, computed.tokens[0], frames))
        await decoded.wait(m.Joined)
        await decoded.wait_for_token()
        while len(decoded.times) < steps and d.session.alive:
            await asyncio.sleep(TICK_S)
        d.drop(target)
        p.drop(source)
        ends = decoded.times[:steps]
        step = median([b - a for a, b in pairwise(ends)])
        return HandoverTiming(nbytes, first - began, ends[0] - first, step)

    async def fetch_cached(self, request: Request) -> TransferTiming:
        """Move the full blocks of a prompt that P has cached into D's prefix cache, from which they
        are evicted first: the root of the cache is another one there."""
        p, d = self._p, self._d
        source, computed = p.sequence()
        await self._cache(request)
        other = request_with_new_root(request)
        target, imported = d.sequence()
        d.session.send(m.Import(target, other))
        await imported.wait(m.ImportStarted)
        began = time.monotonic()
        p.session.send(m.Export(source, request, self._frame_bytes, Codec.FP8))
        p.session.send_slot(m.Grant(source, CREDITS))
        await computed.wait(m.Started)
        nbytes, frames = await self._copy_frames(source, computed, target)
        d.session.send(m.EndImport(target, frames))
        await imported.wait(m.ImportEnded)
        taken = time.monotonic() - began
        d.drop(target)
        p.drop(source)
        return TransferTiming(nbytes, taken)

    async def _cache(self, request: Request) -> None:
        """Have P compute a prompt and keep its blocks."""
        handle, events = self._p.sequence()
        self._p.session.send(m.Prefill(handle, request, self._frame_bytes, Codec.FP8))
        await events.wait(m.Started)
        await events.wait_for_token()
        self._p.session.send_slot(m.EndOffer(handle))
        self._p.drop(handle)

    async def _copy_frames(
        self, source: int, events: SequenceEvents, target: int
    ) -> tuple[int, int]:
        """Copy the frames of a sequence of P into D's slots, and return bytes and frames."""
        p, d = self._p.session, self._d.session
        nbytes = frames = 0
        while True:
            frame = await events.wait(m.KVFrame)
            slot = await self._d.free_slot()
            d.arena.slot(slot, frame.nbytes)[:] = p.arena.slot(frame.slot, frame.nbytes)
            where = target, frame.sequence, slot, frame.piece, frame.nbytes
            d.send_slot(m.Ingest(*where, Codec.FP8))
            p.send_slot(m.SlotsFree([frame.slot]))
            p.send_slot(m.Grant(source, 1))
            nbytes += frame.nbytes
            frames += 1
            if frame.last:
                p.send_slot(m.EndOffer(source))
                return nbytes, frames


def request_with_new_root(request: Request) -> Request:
    """Return the same tokens under another cache root."""
    root = bytes(b ^ 1 for b in request.cache_root)
    return Request(id=request.id, prompt=request.prompt, sampling=request.sampling, cache_root=root)
