"""Pools that differ in page size, storage and number of shards exchange KV: values stay equal."""

from __future__ import annotations

import random
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kv_cache import fp8_grid
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece, Precision, Storage
from engine.kv_cache.kv_pool import KVPool, make_pool
from engine.kv_cache.kv_shards import make_shards, pieces_from_senders
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError, TransferFailed

LAYERS, HEADS, HEAD_DIM = 3, 4, 8
CPU = torch.device("cpu")


class Deployment(NamedTuple):
    """How one side keeps its KV."""

    storage: Storage
    page_tokens: int
    shards: int


def whole_format(precision: Precision, dtype: torch.dtype, side: Deployment) -> KVFormat:
    return KVFormat(
        precision=precision,
        storage=side.storage,
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        element_bytes=dtype.itemsize,
        page_tokens=side.page_tokens,
    )


class ShardedSequence:
    """The KV of one sequence of ``blocks`` blocks, in one pool for each shard, on pages in no
    order."""

    def __init__(self, whole: KVFormat, shards: int, dtype: torch.dtype, blocks: int) -> None:
        self.formats = make_shards(whole, shards)
        self.page_tokens = whole.page_tokens
        held = -(-blocks * BLOCK_TOKENS // whole.page_tokens)
        self.pages = random.Random(blocks).sample(range(held + 3), held)
        self.pools = [make_pool(each, held + 3, dtype, CPU) for each in self.formats]
        tokens = torch.arange(blocks * BLOCK_TOKENS)
        pages = torch.tensor(self.pages)[tokens // whole.page_tokens]
        self.slots = pages * whole.page_tokens + tokens % whole.page_tokens

    def store(self, kv: Tensor) -> None:
        """Store kv [layers, tokens, 2, heads of the model, head_dim]."""
        for pool in self.pools:
            first = pool.format.first_head
            own = kv[:, :, :, first : first + pool.format.kv_heads]
            for layer in range(LAYERS):
                pool.store(layer, self.slots, own[layer].clone())

    def values(self, pool: KVPool) -> Tensor:
        """Return [layers, tokens, 2, kv_heads, head_dim], read as attention reads it."""
        every = torch.arange(max(self.pages) + 1)
        layers = [
            pool.layer(layer).gather(every).flatten(0, 1)[self.slots] for layer in range(LAYERS)
        ]
        return torch.stack(layers)

    def pages_of(self, piece: KVPiece) -> list[int]:
        first = piece.block * BLOCK_TOKENS // self.page_tokens
        end = -(-(piece.block + piece.blocks) * BLOCK_TOKENS // self.page_tokens)
        return self.pages[first:end]


def exchange(
    p: ShardedSequence,
    d: ShardedSequence,
    skip: int,
    blocks: int,
    codec: Codec,
    draw: random.Random,
) -> None:
    """Send blocks ``skip .. blocks`` from every shard to every shard, frames in any order."""
    frames = []
    for target in d.pools:
        size = draw.randint(1, 2 * LAYERS + 1) * target.format.block_layer_bytes(codec)
        asked = pieces_from_senders(target.format, p.formats, skip, blocks, codec, size)
        for source, pieces in zip(p.pools, asked, strict=True):
            for piece in pieces:
                frame = torch.empty(target.format.piece_bytes(piece, codec), dtype=torch.uint8)
                assert source.read(piece, p.pages_of(piece), frame, codec) == len(frame)
                frames.append((target, piece, frame))
    draw.shuffle(frames)
    for target, piece, frame in frames:
        target.write(piece, d.pages_of(piece), frame, codec)


def deployments(precision: Precision) -> st.SearchStrategy[Deployment]:
    storages: list[Storage] = ["wide"] if precision == "exact" else ["wide", "fp8"]
    pages, shards = st.sampled_from([16, 32, 64]), st.sampled_from([1, 2, 4])
    return st.builds(Deployment, st.sampled_from(storages), pages, shards)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_two_deployments_exchange_kv(data: st.DataObject) -> None:
    precision: Precision = data.draw(st.sampled_from(["exact", "fp8"]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    sides = [data.draw(deployments(precision)) for _ in range(2)]
    blocks = data.draw(st.integers(1, 7))
    skip = data.draw(st.integers(0, blocks - 1))
    seed = data.draw(st.integers(0, 1000))
    p, d = (
        ShardedSequence(whole_format(precision, dtype, side), side.shards, dtype, blocks)
        for side in sides
    )
    codec = data.draw(st.sampled_from(p.formats[0].codecs))
    draw = torch.Generator().manual_seed(seed)
    kv = torch.randn(LAYERS, blocks * BLOCK_TOKENS, 2, HEADS, HEAD_DIM, generator=draw).to(dtype)
    p.store(kv)
    before = -kv  # what the receiver's pages held
    d.store(before)
    # Small portions divide frames as portions of the usual size divide those of large models.
    with patch.object(fp8_grid, "PORTION", data.draw(st.sampled_from([100, 5000, 1 << 17]))):
        exchange(p, d, skip, blocks, codec, random.Random(seed))
    sent = torch.cat([p.values(pool) for pool in p.pools], dim=3)
    got = torch.cat([d.values(pool) for pool in d.pools], dim=3)
    kept = skip * BLOCK_TOKENS
    assert torch.equal(got[:, kept:], sent[:, kept:])
    assert torch.equal(got[:, :kept], -sent[:, :kept])


@given(
    heads=st.sampled_from([1, 2, 4, 8, 12]),
    p=st.sampled_from([1, 2, 4, 8]),
    d=st.sampled_from([1, 2, 4, 8]),
)
def test_each_head_is_asked_once(heads: int, p: int, d: int) -> None:
    """Also where several shards hold the same head, because there are more shards than heads."""
    whole = msgspec.structs.replace(
        whole_format("exact", torch.float32, Deployment("wide", 32, 1)), kv_heads=heads
    )
    try:
        senders, receivers = make_shards(whole, p), make_shards(whole, d)
    except StartupError:
        assert any(heads % shards and shards % heads for shards in (p, d))
        return
    for receiver in receivers:
        asked = pieces_from_senders(receiver, senders, 0, 2, Codec.RAW, 1 << 20)
        covered = []
        for sender, pieces in zip(senders, asked, strict=True):
            for piece in pieces:
                sender.heads_of(piece)  # raises for heads that the sender does not hold
                receiver.heads_of(piece)
                first, count = piece.head, piece.heads or heads
                covered += [
                    (piece.block + b, first + h) for b in range(piece.blocks) for h in range(count)
                ]
        own = range(receiver.first_head, receiver.first_head + receiver.kv_heads)
        assert sorted(covered) == [(block, head) for block in range(2) for head in own]


def test_whole_models_exchange_pieces_without_a_range_of_heads() -> None:
    whole = whole_format("exact", torch.float32, Deployment("wide", 32, 1))
    [pieces] = pieces_from_senders(whole, [whole], 1, 3, Codec.RAW, 1 << 20)
    assert pieces == [KVPiece(0, LAYERS, 1, 2)]


def test_senders_that_lack_heads_or_serve_another_model_are_refused() -> None:
    whole = whole_format("exact", torch.float32, Deployment("wide", 32, 1))
    half = make_shards(whole, 2)[:1]
    with pytest.raises(TransferFailed, match=r"no sender holds the KV heads \[2, 3\]"):
        pieces_from_senders(whole, half, 0, 1, Codec.RAW, 1 << 20)
    other = msgspec.structs.replace(whole, head_dim=16)
    with pytest.raises(TransferFailed, match="same precision"):
        pieces_from_senders(whole, [other], 0, 1, Codec.RAW, 1 << 20)
    with pytest.raises(StartupError, match="4 KV heads cannot be divided among 3 shards"):
        make_shards(whole, 3)
