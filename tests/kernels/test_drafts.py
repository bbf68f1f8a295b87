"""Accepted drafts and their KV against the code that does it on the host."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain

import pytest
import torch
from torch import Tensor

from engine.batching.batcher import kv_slots
from engine.batching.draft_layout import accepted_nodes
from engine.kernels.drafts import AcceptedPaths, accept_drafts, move_accepted_kv
from engine.kernels.paged_rows import PagedRows, PieceList, rows_bound
from engine.kv_cache.kv_format import KVFormat, Precision, Storage
from engine.kv_cache.kv_pool import Fp8Pool, KVPool, WidePool, make_pool
from protocol.block_keys import BLOCK_TOKENS

LAYERS, PAGES, STATE_ROWS = 2, 48, 11
DEPTH = 8


@dataclass(frozen=True)
class HostTree:
    """The drafts of one sequence and what the model drew after each of its rows."""

    parents: list[int]  # [n] -1: the last token
    tokens: list[int]  # [n]
    drawn: list[int]  # [1 + n]

    @property
    def path(self) -> list[int]:
        return accepted_nodes(self.parents, self.tokens, self.drawn)

    @property
    def ancestors(self) -> list[int]:
        """For each row the rows on its path, as bits."""
        bits = [1]
        for node, parent in enumerate(self.parents):
            bits.append(bits[parent + 1] | 1 << (node + 1))
        return bits


def random_tree(generator: random.Random, nodes: int, kinds: int) -> HostTree:
    """A tree of at most DEPTH levels, with ``kinds`` different tokens: the fewer, the more drafts
    are accepted, and siblings may have the same token."""
    parents: list[int] = []
    depth: list[int] = []
    for node in range(nodes):
        parent = generator.randrange(max(-1, node - 4), node)
        if parent >= 0 and depth[parent] >= DEPTH:
            parent = -1
        parents.append(parent)
        depth.append(1 if parent < 0 else depth[parent] + 1)
    tokens = [generator.randrange(kinds) for _ in range(nodes)]
    return HostTree(parents, tokens, [generator.randrange(kinds) for _ in range(nodes + 1)])


def chain_of(tokens: list[int], drawn: list[int]) -> HostTree:
    return HostTree(list(range(-1, len(tokens) - 1)), tokens, drawn)


class Step:
    """The trees of some sequences on the device, with a state whose rows are in another order, and
    ``padding`` sequences after them that stand for nothing."""

    def __init__(self, trees: list[HostTree], device: torch.device, padding: int = 0) -> None:
        def ints(values: Iterable[int]) -> Tensor:
            wrapped = [x - 2**64 if x >= 2**63 else x for x in values]
            return torch.tensor(wrapped, dtype=torch.int64, device=device)

        counts = [1 + len(tree.parents) for tree in trees]
        size = len(trees) + padding
        self.trees = trees
        self.drawn = ints(chain.from_iterable(tree.drawn for tree in trees))
        self.drafts = ints(chain.from_iterable(tree.tokens for tree in trees))
        first = [0, *accumulate(counts)][:-1] + [10**9] * padding
        self.length = torch.arange(40, 40 + 13 * STATE_ROWS, 13, device=device)
        self.last_token = torch.zeros_like(self.length)
        state_row = ints((3 * i + 1) % STATE_ROWS for i in range(size))
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(len(self.drawn)))
        self.rows = PagedRows(
            table=order[: STATE_ROWS * 4].view(STATE_ROWS, 4).repeat(1, 2).to(device),
            state_row=state_row,
            known=self.length[state_row] - 1,
            first_row=ints(first),
            first_node=ints(row - index for index, row in enumerate(first)),
            row_count=ints(counts + [0] * padding),
            depth=torch.empty(0),
            ancestors=ints(chain.from_iterable(tree.ancestors for tree in trees)),
            owner=torch.empty(0),
            most_rows=rows_bound(max(counts)),
            pieces=PieceList.empty(1, size, device),
        )
        self.accepted = AcceptedPaths(size + 1, DEPTH, device)

    def accept(self) -> None:
        accept_drafts(
            self.drawn,
            self.rows,
            self.drafts,
            self.length,
            self.last_token,
            self.accepted,
        )


def some_trees(seed: int) -> list[HostTree]:
    generator = random.Random(seed)
    sizes = [generator.choice([0, 1, 3, 8, 31]) for _ in range(6)]
    return [random_tree(generator, nodes, kinds=generator.choice([1, 2, 3])) for nodes in sizes]


def check_accepted(step: Step, index: int, path: list[int]) -> None:
    """Compare what was accepted of one sequence with its path on the host."""
    tree, padding = step.trees[index], DEPTH - len(path)
    tokens = [tree.drawn[0], *(tree.drawn[node + 1] for node in path)]
    assert step.accepted.counts[index] == len(tokens)
    assert step.accepted.paths[index].tolist() == [0, *(n + 1 for n in path), *[-1] * padding]
    assert step.accepted.tokens[index].tolist() == tokens + tokens[-1:] * padding


@pytest.mark.parametrize("seed", range(12))
def test_accepted_paths_are_those_of_the_host(seed: int, device: torch.device) -> None:
    step = Step(some_trees(seed), device)
    length = step.length.clone()
    step.accept()
    for index, tree in enumerate(step.trees):
        check_accepted(step, index, tree.path)
        row = int(step.rows.state_row[index])
        assert step.length[row] == length[row] + len(tree.path) + 1
        assert step.last_token[row] == tree.drawn[tree.path[-1] + 1 if tree.path else 0]
    others = sorted(set(range(STATE_ROWS)) - set(step.rows.state_row.tolist()))
    assert torch.equal(step.length[others], length[others])


def test_random_trees_are_accepted_in_part() -> None:
    """The other tests compare something."""
    trees = [tree for seed in range(12) for tree in some_trees(seed)]
    assert {len(tree.path) for tree in trees} >= set(range(5))
    moved = [tree for tree in trees if tree.path != list(range(len(tree.path)))]
    assert len(moved) > 10


def test_first_of_siblings_with_one_token_is_accepted(device: torch.device) -> None:
    twins = HostTree([-1, -1, 0, 1], [5, 5, 6, 6], [5, 8, 6, 9, 9])
    step = Step([twins], device)
    step.accept()
    check_accepted(step, 0, [0])


def test_drafts_deeper_than_the_result_are_not_accepted(device: torch.device) -> None:
    step = Step([chain_of([1] * (DEPTH + 3), [1] * (DEPTH + 4))], device)
    step.accept()
    check_accepted(step, 0, list(range(DEPTH)))


def test_sequence_of_64_rows_has_all_bits(device: torch.device) -> None:
    parents = [-1] * 61 + [60, 61]
    tokens = [*range(61), 90, 91]
    step = Step([HostTree(parents, tokens, [60, *[0] * 60, 90, 91, 92])], device)
    step.accept()
    check_accepted(step, 0, [60, 61, 62])


def test_padding_updates_nothing(device: torch.device) -> None:
    trees = [chain_of([1, 1], [1, 1, 1]), chain_of([2], [3, 4])]
    step = Step(trees, device, padding=2)
    length = step.length.clone()
    step.accept()
    check_accepted(step, 0, [0, 1])
    check_accepted(step, 1, [])
    assert step.accepted.counts.tolist() == [3, 1, 0, 0, 0]
    padding = step.rows.state_row[2:]
    assert torch.equal(step.length[padding], length[padding])
    assert not step.last_token[padding].any()


def random_pool(
    precision: Precision, storage: Storage, dtype: torch.dtype, heads: int, device: torch.device
) -> KVPool:
    format_ = KVFormat(
        precision=precision,
        storage=storage,
        layers=LAYERS,
        kv_heads=heads,
        head_dim=24,
        element_bytes=dtype.itemsize,
    )
    pool = make_pool(format_, PAGES, dtype, device)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors(pool):
        values = torch.randint(0, 100, tensor.shape, generator=generator)
        tensor.copy_(values)
    return pool


def tensors(pool: KVPool) -> list[Tensor]:
    if isinstance(pool, Fp8Pool):
        return [pool.payload, pool.exponents]
    assert isinstance(pool, WidePool)
    return [pool.tensor]


def move_on_the_host(step: Step, pool: KVPool) -> None:
    for index, tree in enumerate(step.trees):
        places = [(node + 1, place + 1) for place, node in enumerate(tree.path) if node != place]
        if places:
            table = step.rows.table[step.rows.state_row[index]]
            at = torch.tensor(places, device=table.device) + step.rows.known[index]
            source, target = (kv_slots(table[x // BLOCK_TOKENS], x) for x in at.unbind(1))
            pool.move(source, target)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("precision", "storage", "dtype", "heads"),
    [
        ("exact", "wide", torch.float32, 3),
        ("exact", "wide", torch.bfloat16, 2),
        ("fp8", "fp8", torch.bfloat16, 3),
    ],
)
def test_kv_of_accepted_nodes_moves_to_their_positions(
    seed: int,
    precision: Precision,
    storage: Storage,
    dtype: torch.dtype,
    heads: int,
    device: torch.device,
) -> None:
    moving = HostTree([-1, -1, 1, 0, 2], [1, 2, 3, 4, 5], [2, 9, 3, 5, 9, 6])  # its path: 1, 2, 4
    step = Step([moving, *some_trees(seed)], device, padding=1)
    pools = [random_pool(precision, storage, dtype, heads, device) for _ in range(2)]
    before = [tensor.clone() for tensor in tensors(pools[0])]
    move_on_the_host(step, pools[1])
    step.accept()
    move_accepted_kv(tensors(pools[0]), step.rows, step.accepted)
    for ours, theirs, old in zip(*map(tensors, pools), before, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, old), "something moved"
