"""Launches of every kernel in the shapes of served models: what ``compiling`` compiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.kernels import (
    attention,
    drafts,
    elementwise,
    fp8,
    gather,
    kv_copy,
    kv_store,
    sampling,
    step_inputs,
)
from engine.kernels.paged_rows import PagedRows, PieceList
from engine.kv_cache.kv_format import KVFormat, KVPiece, Storage
from engine.kv_cache.kv_frames import FrameCopy
from engine.kv_cache.kv_pool import make_pool

_PAGES = 64


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that kernels are specialised for."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    window: int = 0
    softcap: float = 0.0
    gelu: bool = False


SHAPES = {
    "llama-3-8b": ModelShape(4096, 14336, 32, 8, 128),
    "qwen3-8b": ModelShape(4096, 12288, 32, 8, 128, qk_norm=True),
    "qwen3-0.6b": ModelShape(1024, 3072, 16, 8, 128, qk_norm=True),
    "llama-3.2-1b": ModelShape(2048, 8192, 32, 8, 64),
    "mistral-7b": ModelShape(4096, 14336, 32, 8, 128, window=4096),
    "gemma-2-9b": ModelShape(3584, 14336, 16, 8, 256, window=4096, softcap=50.0, gelu=True),
}
GROUPED_SHAPES = {
    "llama-3-70b": ModelShape(8192, 28672, 64, 8, 128),
    "qwen2.5-7b": ModelShape(3584, 18944, 28, 4, 128),
    "qwen3-235b": ModelShape(4096, 12288, 64, 4, 128, qk_norm=True),
}
"""Models with more query heads for each KV head, whose attention needs more memory."""

STORAGES: tuple[Storage, ...] = ("fp8", "wide")
QUERIES = (1, 2, 4, 16, 32)
"""Rows of a sequence: one, and with drafts."""


def take_capability(arch: int) -> None:
    """Let the launch functions believe that CPU tensors are on ``sm_{arch}``."""
    fp8.converts_e4m3 = lambda _device: arch >= 89


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _pool(shape: ModelShape, storage: str) -> tuple[Tensor, Tensor | None]:
    sizes = (_PAGES, 32, 2, shape.kv_heads, shape.head_dim)
    if storage == "wide":
        return _values(*sizes), None
    return _values(*sizes, dtype=torch.uint8), _values(*sizes[:-1], dtype=torch.uint8)


def _rows(queries: int, sequences: int = 4) -> PagedRows:
    count = sequences * queries
    return PagedRows(
        table=_ints(8, 16),
        state_row=_ints(sequences),
        known=_ints(sequences),
        first_row=_ints(sequences),
        first_node=_ints(sequences),
        row_count=_ints(sequences),
        depth=_ints(count),
        ancestors=_ints(count),
        owner=_ints(count),
        pieces=PieceList.empty(32, sequences, torch.device("cpu")),
        most_rows=queries,
    )


def _attention(shape: ModelShape, storage: str, queries: int) -> None:
    rows = _rows(queries)
    count = len(rows.owner)
    q = _values(count, shape.heads + 2 * shape.kv_heads, shape.head_dim)[:, : shape.heads]
    look = attention.AttentionShape(0.1, shape.softcap, shape.window)
    out = _values(count, shape.heads, shape.head_dim)
    layer = kv_store.PoolLayer(*_pool(shape, storage), rounds=True)
    attention.decode_attention(q, layer, rows, look, out)


def _store(shape: ModelShape, storage: str) -> None:
    weight = _values(shape.head_dim)
    norms = kv_store.HeadNorms(weight, weight, 1e-6) if shape.qk_norm else None
    layer = kv_store.PoolLayer(*_pool(shape, storage), rounds=True)
    projected = _values(4, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    rotation = _values(64, shape.head_dim, dtype=torch.float32)
    kv_store.rotate_and_store_(projected, rotation, _ints(4), _ints(4), norms, layer, shape.heads)


def _elementwise(shape: ModelShape) -> None:
    x, weight = _values(4, shape.hidden), _values(shape.hidden)
    elementwise.rms_norm(x, weight, 1e-5)
    elementwise.add_and_norm(x, x, weight, 1e-5)
    elementwise.gated(_values(4, 2 * shape.intermediate), "gelu_tanh" if shape.gelu else "silu")


def _gather(shape: ModelShape, storage: str) -> None:
    gather.gather_slots(*_pool(shape, storage), _ints(8), torch.bfloat16)


def _kv_frames(shape: ModelShape, storage: Storage) -> None:
    kv = KVFormat(
        precision="fp8",
        storage=storage,
        layers=1,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        element_bytes=2,
    )
    pool = make_pool(kv, 2, torch.bfloat16, torch.device("cpu"))
    staging = _values(2, 1 << 20, dtype=torch.uint8)
    half = shape.kv_heads // 2  # what another shard of the model holds
    pieces = [KVPiece(0, 1, 0, 1), KVPiece(0, 1, 0, 1, half, half)]
    for codec, piece in itertools.product(kv.codecs, pieces):
        frames = [FrameCopy(0, piece, [1], codec)]
        kv_copy.gather_frames(pool, staging, frames)
        kv_copy.find_defects(pool, staging, frames)
        kv_copy.scatter_frames(pool, staging, frames)


def _inputs(queries: int) -> None:
    for sequences in (1, 64, 256):
        for padded in (False, True):
            rows = _rows(queries, sequences)
            inputs = step_inputs.StepInputs(*_ints(3, len(rows.owner)).unbind())
            nodes = None if queries == 1 else _ints(len(rows.owner))
            step_inputs.fill_step_inputs(rows, _ints(8), _ints(8), nodes, inputs, padded=padded)


def _draw(vocab: int) -> None:
    cpu = torch.device("cpu")
    table = _values(8, 6, dtype=torch.float32)
    state = sampling.DrawState(table[:, 0], _ints(8, 3)[:, 0], _ints(8), _ints(8))
    workspace = sampling.DrawWorkspace(16, vocab, cpu)
    logits, rows = _values(4, vocab, dtype=torch.float32), _rows(4, 1)
    plain = sampling.DrawRows(_ints(4), _ints(4))
    sampling.draw_tokens(logits, plain, state, workspace)
    sampling.draw_tokens(logits, sampling.DrawRows(_ints(4)), state, workspace)
    drafted = sampling.DrawRows(rows.state_row, rows.row_count, rows.owner, _ints(4))
    sampling.draw_tokens(logits, drafted, state, workspace, update=False)


def _accept(shape: ModelShape, storage: str) -> None:
    for queries in QUERIES[1:]:
        rows = _rows(queries)
        accepted = drafts.AcceptedPaths(4, queries - 1, torch.device("cpu"))
        numbers = _ints(len(rows.owner))
        drafts.accept_drafts(numbers, rows, numbers, _ints(8), _ints(8), accepted)
        pool = [part[None] for part in _pool(shape, storage) if part is not None]
        drafts.move_accepted_kv(pool, rows, accepted)


def product_cases() -> dict[str, Callable[[], None]]:
    """Return the launches by name."""
    cases: dict[str, Callable[[], None]] = {}
    for queries in QUERIES:
        cases[f"inputs, {queries} rows"] = partial(_inputs, queries)
    for vocab in (128256, 151936):
        cases[f"draw from {vocab}"] = partial(_draw, vocab)
    for name, shape in SHAPES.items():
        cases[f"{name} norms and gate"] = partial(_elementwise, shape)
        for storage in STORAGES:
            own = f"{name} {storage}"
            cases[f"{own} store"] = partial(_store, shape, storage)
            cases[f"{own} accept"] = partial(_accept, shape, storage)
            cases[f"{own} gather"] = partial(_gather, shape, storage)
            cases[f"{own} frames"] = partial(_kv_frames, shape, storage)
            for queries in QUERIES:
                launch = partial(_attention, shape, storage, queries)
                cases[f"{own} attention, {queries} rows"] = launch
    for name, shape in GROUPED_SHAPES.items():
        most = attention.rows_of_runs(16, shape.heads // shape.kv_heads, shape.head_dim, 2)
        for storage, queries in itertools.product(STORAGES, (1, most)):
            launch = partial(_attention, shape, storage, queries)
            cases[f"{name} {storage} attention, {queries} rows"] = launch
    return cases
