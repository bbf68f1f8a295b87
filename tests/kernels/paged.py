"""Pools with random KV, rows over them, and attention computed row by row in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.paged_rows import PagedRows, PieceList, piece_count, rows_bound
from engine.kv_cache.kv_format import KVFormat, Precision, Storage
from engine.kv_cache.kv_pool import KVPool, make_pool
from protocol.block_keys import BLOCK_TOKENS


@dataclass(frozen=True)
class Tree:
    """Decode rows of one sequence: ``known`` tokens before them, and the parent of each draft node
    as a row (0: the last token)."""

    known: int
    parents: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return 1 + len(self.parents)

    def paths(self) -> list[list[int]]:
        """Return the rows from the last token down to each row."""
        paths = [[0]]
        for i, parent in enumerate(self.parents, 1):
            paths.append([*paths[parent], i])
        return paths


def random_pool(
    precision: Precision, storage: Storage, pages: int, kv_heads: int, head_dim: int, device: str
) -> KVPool:
    """Return a pool of one layer whose pages are all filled with values of various sizes."""
    format_ = KVFormat(
        precision=precision,
        storage=storage,
        layers=1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        element_bytes=4,
    )
    pool = make_pool(format_, pages, torch.float32, torch.device(device))
    slots = torch.arange(pages * BLOCK_TOKENS, device=device)
    kv = torch.randn(len(slots), 2, kv_heads, head_dim, device=device)
    kv *= 2.0 ** torch.randint(-3, 3, (len(slots), 2, kv_heads, 1), device=device)
    pool.store(0, slots, kv)
    return pool


def paged_rows(trees: Sequence[Tree], pages: int, device: str, *, spare: int = 0) -> PagedRows:
    """Return rows whose sequences use random pages; ``spare`` items of the list have no piece."""
    counts = [tree.rows for tree in trees]
    most = max(-(-(tree.known + tree.rows) // BLOCK_TOKENS) for tree in trees)
    table = torch.stack([torch.randperm(pages)[:most] for _ in range(len(trees) + 1)])
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    paths = [path for tree in trees for path in tree.paths()]

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PagedRows(
        table=table.to(device),
        state_row=tensor(range(1, len(trees) + 1)),
        known=tensor([tree.known for tree in trees]),
        first_row=tensor(firsts),
        first_node=tensor([first - i for i, first in enumerate(firsts)]),
        row_count=tensor(counts),
        depth=tensor([len(path) - 1 for path in paths]),
        ancestors=tensor([sum(1 << row for row in path) for path in paths]),
        owner=tensor([i for i, count in enumerate(counts) for _ in range(count)]),
        pieces=_pieces(trees, spare, torch.device(device)),
        most_rows=rows_bound(max(counts)),
    )


def _pieces(trees: Sequence[Tree], spare: int, device: torch.device) -> PieceList:
    counts = [piece_count(tree.known + tree.rows) for tree in trees]
    pieces = PieceList.empty(sum(counts) + spare, len(trees), device)
    items = [(s << 32) | piece for s, count in enumerate(counts) for piece in range(count)]
    pieces.items[: len(items)] = torch.tensor(items)
    pieces.starts.copy_(torch.tensor([sum(counts[:s]) for s in range(len(counts))]))
    pieces.total.fill_(len(items))
    return pieces


def reference_attention(
    q: Tensor, pool: KVPool, rows: PagedRows, trees: Sequence[Tree], shape: AttentionShape
) -> Tensor:
    """Return attention [R, heads, head_dim] in fp64, computed row by row on the CPU."""
    out, table = [], rows.table.cpu()
    for i, tree in enumerate(trees):
        pages = -(-(tree.known + tree.rows) // BLOCK_TOKENS)
        kv = pool.layer(0).gather(rows.table[i + 1][:pages]).flatten(0, 1).double().cpu()
        assert len(table) > i
        for path in tree.paths():
            position = tree.known + len(path) - 1
            keys = list(range(tree.known)) + [tree.known + row for row in path]
            places = list(range(tree.known)) + [tree.known + d for d in range(len(path))]
            if shape.window:
                near = [k > position - shape.window for k in places]
                keys = [key for key, kept in zip(keys, near, strict=True) if kept]
            own = q[len(out)].double().cpu()
            k, v = kv[keys].unbind(1)
            group = len(own) // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", own, k) * shape.scale
            if shape.softcap:
                scores = (scores / shape.softcap).tanh() * shape.softcap
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return torch.stack(out)
