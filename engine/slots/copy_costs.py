"""Measures what an engine takes to copy KV between its pool and frames, at its start.

A piece of the pool is copied into a frame and back to the same pages with each codec: that changes
no value. The frame is as large as most are. On a GPU the copies are those of hand-overs: kernels
between the pool and staging memory, and a copy between staging and pinned memory. On a CPU one
thread copies, as in hand-overs. The fastest of several repeats counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from engine.ipc.settings import CopyCosts
from engine.kv_cache.kv_format import Codec, split_into_pieces
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import KVPool
from protocol.block_keys import BLOCK_TOKENS

_Copies: TypeAlias = tuple[Callable[[], object], Callable[[], object]]
"""Functions that copy one frame out of a pool and back into it."""

REPEATS = 3
FRAME_BYTES = {"cpu": 512 << 10, "cuda": 4 << 20}
"""Bytes of raw KV that are copied, on a CPU in about 2 ms with both codecs; one layer of one block
at least."""


def measure_copy_costs(pool: KVPool, pages: int, *, by_kernels: bool) -> CopyCosts:
    """Return the seconds per byte of raw KV. The pool has ``pages`` pages; no other thread writes
    them meanwhile. ``by_kernels``: frames of this pool are copied by kernels."""
    kv = pool.format
    size = kv.block_layer_bytes(Codec.RAW)
    blocks = max(1, pages * kv.page_tokens // BLOCK_TOKENS)
    frame_bytes = max(size, FRAME_BYTES[pool.device.type])
    piece = split_into_pieces(0, blocks, kv.layers, size, frame_bytes)[0]
    raw_bytes = kv.piece_bytes(piece, Codec.RAW)
    # Kernels view a slot as values of 2 or 4 bytes.
    slot_bytes = max(kv.piece_bytes(piece, codec) for codec in kv.codecs) // 16 * 16 + 16
    costs = {}
    for codec in kv.codecs:
        held = range(-(-piece.blocks * BLOCK_TOKENS // kv.page_tokens))
        make = _kernel_copies if by_kernels else _pool_copies
        copies = make(pool, FrameCopy(0, piece, held, codec), slot_bytes)
        for what, copy in zip(("read", "write"), copies, strict=True):
            with _one_thread():
                seconds = _quickest(copy, pool.device)
            costs[f"{what}_{codec.name.lower()}"] = seconds / raw_bytes
    return CopyCosts(**costs)


def _pool_copies(pool: KVPool, frame: FrameCopy, slot_bytes: int) -> _Copies:
    data = torch.empty(slot_bytes, dtype=torch.uint8)
    data = data[: pool.format.piece_bytes(frame.piece, frame.codec)]
    return (
        lambda: pool.read(frame.piece, frame.pages, data, frame.codec),
        lambda: pool.write(frame.piece, frame.pages, data, frame.codec),
    )


def _kernel_copies(pool: KVPool, frame: FrameCopy, slot_bytes: int) -> _Copies:
    from engine.kernels import kv_copy  # imports Triton, which belongs to the GPU build

    nbytes = pool.format.piece_bytes(frame.piece, frame.codec)
    data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")
    staging = torch.empty(1, slot_bytes, dtype=torch.uint8, device=pool.device)

    def read() -> None:
        kv_copy.gather_frames(pool, staging, [frame])
        data.copy_(staging[0, :nbytes], non_blocking=True)

    def write() -> None:
        staging[0, :nbytes].copy_(data, non_blocking=True)
        kv_copy.find_defects(pool, staging, [frame])
        kv_copy.scatter_frames(pool, staging, [frame])

    return read, write


def _quickest(copy: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of REPEATS copies, after one that is not counted."""
    found = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
