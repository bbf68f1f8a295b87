"""Decode attention over the paged pool against attention row by row in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape, decode_attention
from engine.kernels.paged_rows import PagedRows
from engine.kv_cache.kv_format import Storage
from engine.kv_cache.kv_pool import KVPool
from engine.model.fused_layers import pool_layers
from protocol.block_keys import BLOCK_TOKENS
from tests.kernels.paged import Tree, paged_rows, random_pool, reference_attention

HEADS, KV_HEADS, PAGES = 4, 2, 40
CHAIN = tuple(range(6))
BUSH = (0, 0, 1, 1, 2, 5, 3)
PLAIN = [Tree(known) for known in (0, 31, 32, 255, 256, 700)]
DRAFTED = [Tree(5, CHAIN), Tree(254, BUSH), Tree(600), Tree(250, CHAIN), Tree(31, BUSH)]


def attend(q: Tensor, pool: KVPool, rows: PagedRows, shape: AttentionShape) -> Tensor:
    out = torch.full_like(q, float("nan"))
    decode_attention(q, pool_layers(pool)[0], rows, shape, out)
    return out


def queries(rows: PagedRows, head_dim: int, device: torch.device) -> Tensor:
    return torch.randn(len(rows.owner), HEADS, head_dim, device=device)


@pytest.mark.parametrize("storage", ["wide", "fp8"])
@pytest.mark.parametrize("trees", [PLAIN, DRAFTED], ids=["plain", "drafted"])
@pytest.mark.parametrize(
    ("window", "softcap", "head_dim"),
    [(0, 0.0, 32), (0, 20.0, 32), (40, 0.0, 24), (3, 0.0, 16), (300, 5.0, 32)],
)
def test_attention_matches_the_reference(
    storage: Storage,
    trees: Sequence[Tree],
    window: int,
    softcap: float,
    head_dim: int,
    device: torch.device,
) -> None:
    torch.manual_seed(3)
    pool = random_pool("fp8", storage, PAGES, KV_HEADS, head_dim, str(device))
    rows = paged_rows(trees, PAGES, str(device))
    shape = AttentionShape(0.3, softcap, window)
    q = queries(rows, head_dim, device)
    out = attend(q, pool, rows, shape)
    expected = reference_attention(q, pool, rows, trees, shape)
    scale = float(expected.abs().max())
    limit = 1e-5 if device.type == "cpu" else 2e-3  # products in 16 bits under fp8 storage
    assert float((out.cpu() - expected).abs().max()) < limit * scale


@pytest.mark.parametrize("storage", ["wide", "fp8"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    storage: Storage, device: torch.device
) -> None:
    torch.manual_seed(4)
    pool = random_pool("fp8", storage, PAGES, KV_HEADS, 32, str(device))
    rows = paged_rows(PLAIN, PAGES, str(device))
    q, shape = queries(rows, 32, device), AttentionShape(0.2, 0.0, 0)
    together = attend(q, pool, rows, shape)
    for i, tree in enumerate(PLAIN):
        one = paged_rows([tree], PAGES, str(device), spare=3)
        one.table[1] = rows.table[i + 1][: one.table.shape[1]]
        alone = attend(q[i : i + 1], pool, one, shape)
        assert torch.equal(alone[0], together[i])


def test_a_sequence_without_rows_is_skipped(device: torch.device) -> None:
    torch.manual_seed(5)
    pool = random_pool("fp8", "fp8", PAGES, KV_HEADS, 32, str(device))
    rows = paged_rows([Tree(40), Tree(70)], PAGES, str(device))
    q, shape = queries(rows, 32, device), AttentionShape(0.2, 0.0, 0)
    full = attend(q, pool, rows, shape)
    rows.row_count[0] = 0  # its pieces stay in the list, and write to no row
    part = attend(q, pool, rows, shape)
    assert torch.equal(part[1], full[1])
    assert not part[0].any()


@pytest.mark.parametrize("storage", ["wide", "fp8"])
@pytest.mark.parametrize("tree", [Tree(0), Tree(31), Tree(290), Tree(254, BUSH)])
def test_slots_behind_the_last_token_do_not_matter(
    storage: Storage, tree: Tree, device: torch.device
) -> None:
    torch.manual_seed(6)
    pool = random_pool("fp8", storage, PAGES, KV_HEADS, 32, str(device))
    rows = paged_rows([tree], PAGES, str(device))
    q, shape = queries(rows, 32, device), AttentionShape(0.2, 0.0, 0)
    before = attend(q, pool, rows, shape)
    end = tree.known + tree.rows
    page = rows.table[1, (end - 1) // BLOCK_TOKENS]
    others = torch.arange(PAGES * BLOCK_TOKENS, device=device)
    used = torch.isin(others // BLOCK_TOKENS, rows.table[1])
    behind = (others // BLOCK_TOKENS == page) & (others % BLOCK_TOKENS > (end - 1) % BLOCK_TOKENS)
    stale = others[behind | ~used]
    assert len(stale)
    pool.store(0, stale, torch.full((len(stale), 2, KV_HEADS, 32), 5e4, device=device))
    assert torch.equal(attend(q, pool, rows, shape), before)
