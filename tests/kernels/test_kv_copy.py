"""Frames moved by kernels against ``KVPool.read`` and ``write``: the same bytes everywhere."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

from engine.kernels.kv_copy import find_defects, gather_frames, scatter_frames
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece, Precision, Storage
from engine.kv_cache.kv_frames import FrameCopy, FrameDefect, frame_refusal
from engine.kv_cache.kv_pool import Fp8Pool, KVPool, WidePool, make_pool
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed

LAYERS, PAGES = 4, 11
SLOT_BYTES = 1 << 17
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POOLS: list[tuple[Precision, Storage]] = [("exact", "wide"), ("fp8", "wide"), ("fp8", "fp8")]
CASES = [
    (precision, storage, codec, dtype, head_dim)
    for (precision, storage), codec, dtype, head_dim in itertools.product(
        POOLS, Codec, DTYPES, [32, 24]
    )
    if precision == "fp8" or codec is Codec.RAW
]
# Pieces of several blocks and of some layers, on pages that are neither first nor in order.
PIECES = [
    (KVPiece(0, LAYERS, 0, 2), [7, 3]),
    (KVPiece(1, 3, 5, 1), [9]),
    (KVPiece(0, 1, 2, 4), [0, 10, 4, 1]),
]


def empty_pool(
    precision: Precision, storage: Storage, dtype: torch.dtype, head_dim: int, device: torch.device
) -> KVPool:
    kv = KVFormat(
        precision=precision,
        storage=storage,
        layers=LAYERS,
        kv_heads=2,
        head_dim=head_dim,
        element_bytes=dtype.itemsize,
    )
    return make_pool(kv, PAGES, dtype, device)


def filled_pool(
    precision: Precision, storage: Storage, dtype: torch.dtype, head_dim: int, device: torch.device
) -> KVPool:
    """A pool with values of widely different sizes in every slot, zeros among them."""
    pool = empty_pool(precision, storage, dtype, head_dim, device)
    generator = torch.Generator().manual_seed(3)
    slots = torch.arange(PAGES * BLOCK_TOKENS)
    for layer in range(LAYERS):
        kv = torch.randn(len(slots), 2, 2, head_dim, generator=generator)
        kv *= torch.exp2(torch.randn(len(slots), 2, 2, 1, generator=generator) * 6)
        kv[torch.rand(kv.shape, generator=generator) < 0.1] = 0.0
        pool.store(layer, slots.to(device), kv.to(dtype).to(device))
    return pool


def contents(pool: KVPool) -> list[Tensor]:
    if isinstance(pool, Fp8Pool):
        return [pool.payload, pool.exponents]
    assert isinstance(pool, WidePool)
    return [pool.tensor]


def frames(codec: Codec) -> list[FrameCopy]:
    return [FrameCopy(2 * i + 1, piece, pages, codec) for i, (piece, pages) in enumerate(PIECES)]


def staging(device: torch.device) -> Tensor:
    return torch.zeros(2 * len(PIECES), SLOT_BYTES, dtype=torch.uint8, device=device)


def received(pool: KVPool, codec: Codec, device: torch.device) -> tuple[Tensor, list[FrameCopy]]:
    """Staging memory with the frames of ``PIECES``, as another pool would send them."""
    held = staging(device)
    for slot, piece, pages, _ in (group := frames(codec)):
        pool.read(piece, pages, held[slot], codec)
    return held, group


@pytest.mark.parametrize(("precision", "storage", "codec", "dtype", "head_dim"), CASES)
def test_gathered_frames_are_those_that_a_pool_reads(
    precision: Precision,
    storage: Storage,
    codec: Codec,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
) -> None:
    pool = filled_pool(precision, storage, dtype, head_dim, device)
    expected, group = received(pool, codec, device)
    got = staging(device)
    gather_frames(pool, got, group)
    assert torch.equal(got, expected)
    assert int((got != 0).sum()) > 0


@pytest.mark.parametrize(("precision", "storage", "codec", "dtype", "head_dim"), CASES)
def test_scattered_frames_are_those_that_a_pool_writes(
    precision: Precision,
    storage: Storage,
    codec: Codec,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
) -> None:
    sender = filled_pool(precision, storage, dtype, head_dim, device)
    held, group = received(sender, codec, device)
    by_pool = empty_pool(precision, storage, dtype, head_dim, device)
    for slot, piece, pages, _ in group:
        nbytes = piece.bytes(by_pool.format.block_layer_bytes(codec))
        by_pool.write(piece, pages, held[slot, :nbytes], codec)
    by_kernel = empty_pool(precision, storage, dtype, head_dim, device)
    before = held.clone()
    scatter_frames(by_kernel, held, group)
    for got, expected in zip(contents(by_kernel), contents(by_pool), strict=True):
        assert torch.equal(got, expected)
        assert int((got != 0).sum()) > 0
    assert torch.equal(held, before)


@pytest.mark.parametrize("storage", ["wide", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_treats_values_off_the_grid_as_a_pool_does(
    storage: Storage, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(8)
    held = staging(device)
    values = held[1].view(dtype)
    random = torch.randn(len(values), generator=generator) * 30
    values.copy_(random.to(dtype))
    values[5] = 57344.0
    frame = FrameCopy(1, KVPiece(0, 2, 0, 2), [5, 2], Codec.RAW)
    by_pool, by_kernel = (empty_pool("fp8", storage, dtype, 32, device) for _ in range(2))
    nbytes = frame.piece.bytes(by_pool.format.block_layer_bytes(Codec.RAW))
    by_pool.write(frame.piece, frame.pages, held[1, :nbytes], Codec.RAW)
    scatter_frames(by_kernel, held, [frame])
    for got, expected in zip(contents(by_kernel), contents(by_pool), strict=True):
        assert torch.equal(got, expected)


SHARDS = [
    # page_tokens, heads of the pool, its first head, frames as (piece, pages)
    (32, 4, 0, [(KVPiece(0, LAYERS, 0, 2, 1, 2), [7, 3]), (KVPiece(1, 2, 2, 1, 3, 1), [5])]),
    (32, 2, 4, [(KVPiece(0, 3, 1, 1, 4, 2), [6]), (KVPiece(2, 1, 0, 3, 5, 1), [1, 0, 4])]),
    (16, 4, 4, [(KVPiece(0, LAYERS, 1, 1, 4, 4), [9, 2]), (KVPiece(1, 1, 0, 1, 6, 2), [0, 8])]),
    (64, 8, 0, [(KVPiece(0, 2, 1, 3), [10, 4]), (KVPiece(1, 3, 4, 1, 2, 4), [3])]),
]


def shard_pool(
    storage: Storage, page_tokens: int, heads: int, first_head: int, device: torch.device
) -> KVPool:
    kv = KVFormat(
        precision="fp8",
        storage=storage,
        layers=LAYERS,
        kv_heads=heads,
        head_dim=16,
        element_bytes=2,
        first_head=first_head,
        total_heads=8,
        page_tokens=page_tokens,
    )
    return make_pool(kv, PAGES, torch.bfloat16, device)


@pytest.mark.parametrize("storage", ["wide", "fp8"])
@pytest.mark.parametrize(("page_tokens", "heads", "first_head", "pieces"), SHARDS)
def test_heads_and_page_sizes_are_moved_as_a_pool_moves_them(
    storage: Storage,
    page_tokens: int,
    heads: int,
    first_head: int,
    pieces: list[tuple[KVPiece, list[int]]],
    device: torch.device,
) -> None:
    sender, by_pool, by_kernel = (
        shard_pool(storage, page_tokens, heads, first_head, device) for _ in range(3)
    )
    generator = torch.Generator().manual_seed(5)
    slots = torch.arange(PAGES * page_tokens, device=device)
    for layer in range(LAYERS):
        kv = torch.randn(len(slots), 2, heads, 16, generator=generator).bfloat16() * 20
        for pool in (sender, by_pool, by_kernel):  # other heads and pages must stay
            pool.store(layer, slots, (kv if pool is sender else -kv / 3).to(device))
    group = [
        FrameCopy(i, piece, pages, codec)
        for i, ((piece, pages), codec) in enumerate(itertools.product(pieces, Codec))
    ]
    held, expected = (
        torch.zeros(len(group), SLOT_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
    )
    gather_frames(sender, held, group)
    for slot, piece, pages, codec in group:
        nbytes = sender.read(piece, pages, expected[slot], codec)
        assert nbytes == sender.format.piece_bytes(piece, codec)
        by_pool.write(piece, pages, expected[slot, :nbytes], codec)
    assert torch.equal(held, expected)
    assert find_defects(by_kernel, held, group).tolist() == [0] * len(group)
    before = [part.clone() for part in contents(by_kernel)]
    scatter_frames(by_kernel, held, group)
    for got, wanted, old in zip(contents(by_kernel), contents(by_pool), before, strict=True):
        assert torch.equal(got, wanted)
        assert not torch.equal(got, old)


def test_heads_that_a_pool_does_not_hold_are_refused(device: torch.device) -> None:
    pool = shard_pool("fp8", 32, 4, 4, device)
    frame = FrameCopy(0, KVPiece(0, 1, 0, 1, 2, 4), [1], Codec.FP8)
    with pytest.raises(TransferFailed, match="4 heads from head 2 on is not for a pool of 4 heads"):
        gather_frames(pool, staging(device), [frame])


def test_codecs_may_be_mixed_in_one_batch(device: torch.device) -> None:
    sender = filled_pool("fp8", "fp8", torch.float32, 32, device)
    group = [FrameCopy(i, piece, pages, Codec(i % 2)) for i, (piece, pages) in enumerate(PIECES)]
    held, expected = staging(device), staging(device)
    gather_frames(sender, held, group)
    for slot, piece, pages, codec in group:
        sender.read(piece, pages, expected[slot], codec)
    assert torch.equal(held, expected)


def corrupt(held: Tensor, frame: FrameCopy, pool: KVPool, defect: FrameDefect, place: int) -> None:
    """Put one bad byte or value at ``place`` of the frame's payload or exponents."""
    size = pool.format.block_layer_bytes(frame.codec)
    nbytes = frame.piece.bytes(size)
    if defect is FrameDefect.VALUE:
        values = held[frame.slot, :nbytes].view(pool.dtype)
        values[place % len(values)] = [float("nan"), float("inf"), -6e4][place % 3]
        return
    payload = nbytes * pool.format.head_dim // (pool.format.head_dim + 1)
    if defect is FrameDefect.SCALE:
        held[frame.slot, payload + place % (nbytes - payload)] = 23 + place % 200
    else:
        held[frame.slot, place % payload] = 0x7F | (place % 2) << 7


@pytest.mark.parametrize(
    ("codec", "defect"),
    [
        (Codec.RAW, FrameDefect.VALUE),
        (Codec.FP8, FrameDefect.SCALE),
        (Codec.FP8, FrameDefect.NAN_BYTE),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, -1, 5001])
def test_a_defect_is_found_in_its_frame_alone(
    codec: Codec, defect: FrameDefect, dtype: torch.dtype, place: int, device: torch.device
) -> None:
    pool = filled_pool("fp8", "fp8", dtype, 32, device)
    held, group = received(pool, codec, device)
    assert find_defects(pool, held, group).tolist() == [0, 0, 0]
    corrupt(held, group[1], pool, defect, place)
    assert find_defects(pool, held, group).tolist() == [0, int(defect), 0]
    nbytes = group[1].piece.bytes(pool.format.block_layer_bytes(codec))
    with pytest.raises(TransferFailed, match=re.escape(str(frame_refusal(defect)))):
        pool.write(group[1].piece, group[1].pages, held[group[1].slot, :nbytes], codec)


def test_what_lies_behind_a_frame_is_no_defect(device: torch.device) -> None:
    pool = filled_pool("fp8", "wide", torch.bfloat16, 24, device)
    for codec in Codec:
        held, group = received(pool, codec, device)
        for slot, piece, _, _ in group:
            held[slot, piece.bytes(pool.format.block_layer_bytes(codec)) :] = 0xFF
        assert find_defects(pool, held, group).tolist() == [0, 0, 0]


def test_defects_of_mixed_codecs_keep_the_order_of_the_frames(device: torch.device) -> None:
    pool = filled_pool("fp8", "fp8", torch.float32, 32, device)
    group = [
        FrameCopy(i, piece, pages, Codec(1 - i % 2)) for i, (piece, pages) in enumerate(PIECES)
    ]
    held = staging(device)
    gather_frames(pool, held, group)
    corrupt(held, group[0], pool, FrameDefect.SCALE, 3)
    corrupt(held, group[0], pool, FrameDefect.NAN_BYTE, 8)
    corrupt(held, group[1], pool, FrameDefect.VALUE, 9)
    both = FrameDefect.SCALE | FrameDefect.NAN_BYTE
    assert find_defects(pool, held, group).tolist() == [int(both), int(FrameDefect.VALUE), 0]
