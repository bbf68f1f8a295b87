"""The kernels that bench.gpu.parts.kernels times: tensors for each, and the torch code beside it.

A builder makes the tensors of one case, so that those of only one exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from bench.gpu.models import random_frame
from bench.gpu.part import PartContext
from engine.kernels.attention import AttentionShape, decode_attention
from engine.kernels.elementwise import add_and_norm, gated
from engine.kernels.gather import gather_slots
from engine.kernels.kv_copy import gather_frames, scatter_frames
from engine.kernels.kv_store import rotate_and_store_
from engine.kernels.paged_rows import PagedRows, PieceList, piece_count
from engine.kernels.sampling import DrawRows, DrawState, DrawWorkspace, draw_tokens
from engine.kernels.step_inputs import StepInputs, fill_step_inputs
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece, split_into_pieces
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import Fp8Pool
from engine.model.attention import apply_rotary_
from engine.model.fused_layers import pool_layers
from protocol.block_keys import BLOCK_TOKENS

COLD_BYTES = 256 << 20
"""Bytes that the copies of a case have together: some times the L2 cache of an H200."""

MOST_COPIES, MOST_POOLS = 256, 16
SLOT_BYTES = 1 << 20


@dataclass(frozen=True)
class KernelSizes:
    """The dimensions of the model, and the cases that are timed."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    layers: int
    attention: tuple[tuple[int, int, int], ...]  # (sequences, rows of each, context)
    rows: tuple[int, ...]
    drawing: tuple[int, ...]
    gathered: int  # tokens
    frames: int


NumberedCall = Callable[[int], object]
"""Computes on the copy of the tensors with this number."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel with its tensors, and what it is compared with."""

    name: str
    nbytes: int  # read and written by one call
    copies: int
    run: NumberedCall
    against: str
    reference: NumberedCall
    recorded: bool = True  # in a CUDA graph; what uploads tables cannot be


CaseBuilder = partial[KernelCase]
"""Its first two arguments are the sizes and the context."""


def case_builders(sizes: KernelSizes, context: PartContext) -> Iterator[CaseBuilder]:
    """Yield the builders of all cases."""
    for sequences, rows, length in sizes.attention:
        yield partial(_attention, sizes, context, sequences, rows, length)
    for rows in sizes.rows:
        yield partial(_store, sizes, context, rows)
        yield partial(_norm, sizes, context, rows)
        yield partial(_gate, sizes, context, rows)
    for rows in sizes.drawing:
        for temperature in (0.0, 0.8):
            yield partial(_draw, sizes, context, rows, temperature)
    yield partial(_gather, sizes, context)
    for to_pool in (True, False):
        yield partial(_frames, sizes, context, to_pool)


def copies_of(context: PartContext, nbytes: int) -> int:
    """Return how many copies of tensors of ``nbytes`` make a call find none of them in a cache."""
    return 1 if context.on_cpu else max(1, min(MOST_COPIES, -(-COLD_BYTES // nbytes)))


def _pool(sizes: KernelSizes, context: PartContext, layers: int, pages: int) -> Fp8Pool:
    """Return an fp8 pool of random KV."""
    kv = KVFormat(
        precision="fp8",
        storage="fp8",
        layers=layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        element_bytes=context.dtype.itemsize,
    )
    pool = Fp8Pool(kv, pages, context.dtype, context.device)
    for layer in range(layers):
        frame = random_frame(replace(kv, layers=1), pages, context.dtype, context.device)
        pool.write(KVPiece(layer, 1, 0, pages), range(pages), frame, Codec.FP8)
    return pool


def _randn(context: PartContext, *size: int) -> Tensor:
    return torch.randn(size, device=context.device).to(context.dtype)


def _attention(
    sizes: KernelSizes, context: PartContext, sequences: int, rows: int, length: int
) -> KernelCase:
    """Decode attention over fp8 pages, beside SDPA over dense KV in the model's type."""
    heads, dim, tokens = sizes.heads, sizes.head_dim, length + rows
    nbytes = sequences * tokens * 2 * sizes.kv_heads * (dim + 1)
    copies = min(MOST_POOLS, copies_of(context, nbytes))
    pages = -(-tokens // BLOCK_TOKENS)
    layers = pool_layers(_pool(sizes, context, copies, sequences * pages))
    paged = _chain_rows(context, sequences, rows, length, pages)
    q = _randn(context, sequences * rows, heads, dim)
    out = torch.empty_like(q)
    shape = AttentionShape(dim**-0.5, 0.0, 0)
    k, v = _randn(context, 2, sequences, sizes.kv_heads, tokens, dim)
    own = q.view(sequences, rows, heads, dim).transpose(1, 2)
    return KernelCase(
        *(f"decode attention, {sequences} x {length} tokens, {rows} rows each", nbytes, copies),
        lambda i: decode_attention(q, layers[i], paged, shape, out),
        "SDPA, dense KV",
        lambda i: F.scaled_dot_product_attention(own, k, v, enable_gqa=True),
    )


def _chain_rows(
    context: PartContext, sequences: int, rows: int, length: int, pages: int
) -> PagedRows:
    """Return rows of sequences whose pages are scattered; ``rows`` - 1 of each are a chain."""
    one, every = torch.arange(rows), torch.arange(sequences)
    first_row = every * rows
    numbers = {
        "table": torch.randperm(sequences * pages).view(sequences, pages),
        "state_row": every,
        "known": torch.zeros_like(every),
        "first_row": first_row,
        "first_node": first_row - every,
        "row_count": torch.full_like(every, rows),
        "depth": one.repeat(sequences),
        "ancestors": ((2 << one) - 1).repeat(sequences),
        "owner": every.repeat_interleave(rows),
    }
    on_device = {name: tensor.to(context.device) for name, tensor in numbers.items()}
    count = sequences * piece_count(length + rows)
    pieces = PieceList.empty(count, sequences, context.device)
    paged = PagedRows(**on_device, pieces=pieces, most_rows=1 << (rows - 1).bit_length())
    zeros = torch.zeros_like(paged.owner)
    inputs = StepInputs(zeros.clone(), zeros.clone(), zeros.clone())
    lengths = torch.full_like(paged.state_row, length + 1)
    fill_step_inputs(paged, lengths, lengths, zeros, inputs)
    return paged


def _store(sizes: KernelSizes, context: PartContext, rows: int) -> KernelCase:
    """Rotary embedding, rounding and the write to the pool, beside the engine's torch code."""
    heads, dim, rotated = sizes.heads, sizes.head_dim, sizes.heads + sizes.kv_heads
    every = heads + 2 * sizes.kv_heads
    nbytes = rows * (2 * every * dim * context.dtype.itemsize + 2 * sizes.kv_heads * (dim + 1))
    copies = copies_of(context, nbytes)
    pool = _pool(sizes, context, 1, -(-rows // BLOCK_TOKENS))
    layer = pool_layers(pool)[0]
    at = torch.arange(rows, device=context.device)
    x = _randn(context, copies, rows, every, dim)
    angles = torch.rand(rows, dim // 2, device=context.device)
    turns = torch.polar(torch.ones_like(angles), angles)
    cos_sin = torch.view_as_real(turns).flatten(1)

    def in_torch(i: int) -> None:
        apply_rotary_(x[i][:, :rotated], turns[:, None])
        pool.store(0, at, x[i][:, heads:].unflatten(1, (2, sizes.kv_heads)))

    return KernelCase(
        *(f"qkv to pool, {rows} rows", nbytes, copies),
        lambda i: rotate_and_store_(x[i], cos_sin, at, at, None, layer, heads),
        "torch",
        in_torch,
    )


def _norm(sizes: KernelSizes, context: PartContext, rows: int) -> KernelCase:
    """The norm with the sum before it."""
    nbytes = 4 * rows * sizes.hidden * context.dtype.itemsize
    copies = copies_of(context, nbytes)
    weight = _randn(context, sizes.hidden)
    x, y = _randn(context, 2, copies, rows, sizes.hidden)
    return KernelCase(
        *(f"add and norm, {rows} rows", nbytes, copies),
        lambda i: add_and_norm(x[i], y[i], weight, 1e-5),
        "torch",
        lambda i: F.rms_norm(x[i] + y[i], weight.shape, weight, 1e-5),
    )


def _gate(sizes: KernelSizes, context: PartContext, rows: int) -> KernelCase:
    """The gate of the MLP."""
    nbytes = 3 * rows * sizes.intermediate * context.dtype.itemsize
    copies = copies_of(context, nbytes)
    both = _randn(context, copies, rows, 2 * sizes.intermediate)

    def in_torch(i: int) -> Tensor:
        gate, up = both[i].chunk(2, dim=-1)
        return F.silu(gate) * up

    run: NumberedCall = lambda i: gated(both[i], "silu")  # noqa: E731
    return KernelCase(f"gate, {rows} rows", nbytes, copies, run, "torch", in_torch)


def _draw(sizes: KernelSizes, context: PartContext, rows: int, temperature: float) -> KernelCase:
    """The draw of greedy rows or of rows with a temperature, beside argmax."""
    nbytes = rows * sizes.vocab * 4
    copies = copies_of(context, nbytes)
    logits = torch.randn(copies, rows, sizes.vocab, device=context.device)
    at = torch.arange(rows, device=context.device)
    work = DrawWorkspace(rows, sizes.vocab, context.device)
    state = DrawState(
        temperature=torch.full((rows,), temperature, device=context.device),
        keys=at * 7919,
        length=torch.full_like(at, 100),
        last_token=torch.zeros_like(at),
    )
    return KernelCase(
        *(f"draw, {rows} rows, temperature {temperature}", nbytes, copies),
        lambda i: draw_tokens(logits[i], DrawRows(at), state, work, update=False),
        "argmax",
        lambda i: logits[i].argmax(-1),
    )


def _gather(sizes: KernelSizes, context: PartContext) -> KernelCase:
    """The KV of prompts for prefill attention, beside the pool's torch code."""
    pages = sizes.gathered // BLOCK_TOKENS
    nbytes = sizes.gathered * 2 * sizes.kv_heads
    nbytes *= sizes.head_dim * (1 + context.dtype.itemsize) + 1
    copies = min(MOST_POOLS, copies_of(context, nbytes))
    pool = _pool(sizes, context, copies, pages)
    order = torch.randperm(pages, device=context.device)
    within = torch.arange(BLOCK_TOKENS, device=context.device)
    slots = (order[:, None] * BLOCK_TOKENS + within).flatten()
    return KernelCase(
        *(f"gather for prefill, {sizes.gathered} tokens", nbytes, copies),
        lambda i: gather_slots(pool.payload[i], pool.exponents[i], slots, context.dtype),
        "torch",
        lambda i: pool.layer(i).gather(order),
    )


def _frames(sizes: KernelSizes, context: PartContext, to_pool: bool) -> KernelCase:
    """Frames of KV between staging memory on the GPU and the pool, beside a copy of the bytes."""
    pool = _pool(sizes, context, sizes.layers, sizes.frames)
    size = pool.format.block_layer_bytes(Codec.FP8)
    pieces = split_into_pieces(0, sizes.frames, sizes.layers, size, SLOT_BYTES)[: sizes.frames]
    frames = [
        FrameCopy(slot, piece, range(piece.block, piece.block + piece.blocks), Codec.FP8)
        for slot, piece in enumerate(pieces)
    ]
    staging = torch.zeros(len(frames), SLOT_BYTES, dtype=torch.uint8, device=context.device)
    source = torch.zeros(sum(p.bytes(size) for p in pieces), dtype=torch.uint8)
    source = source.to(context.device)
    target = torch.empty_like(source)
    move = scatter_frames if to_pool else gather_frames
    return KernelCase(
        *(f"{move.__name__}, {len(frames)}", 2 * source.nbytes, copies_of(context, COLD_BYTES)),
        lambda i: move(pool, staging, frames),
        "copy",
        lambda i: target.copy_(source),
        recorded=False,
    )
