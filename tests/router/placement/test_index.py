"""The prefix index alone: matches against a walk, sizes, sweeps."""

from __future__ import annotations

import hashlib
import random

from hypothesis import given
from hypothesis import strategies as st

from router.placement.prefix_index import SHARDS, PrefixIndex


def chain(count: int, salt: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{salt}{i}".encode(), digest_size=16).digest() for i in range(count)]


CHAIN = chain(300)
depths = st.dictionaries(st.sampled_from([f"w{i}" for i in range(70)]), st.integers(0, 300))


@given(depths, st.integers(0, 300), st.integers(0, 20))
def test_every_worker_by_its_longest_prefix(held: dict[str, int], asked: int, new: int) -> None:
    index = PrefixIndex()
    for worker, depth in held.items():
        index.store(worker, CHAIN[:depth])
    prompt = CHAIN[:asked] + chain(new, "new")
    expected = {w: min(d, asked) for w, d in held.items() if min(d, asked)}
    assert index.match(prompt) == expected
    some = [w for w in held if w < "w3"]
    assert index.match(prompt, some) == {w: d for w, d in expected.items() if w in some}
    assert index.entries == max(held.values(), default=0)


@given(st.lists(st.sets(st.integers(0, 39)), max_size=5), st.integers(1, 40))
def test_holes_give_a_sane_answer(held: list[set[int]], asked: int) -> None:
    """Prefixes that are not closed, as while reports are on their way."""
    index = PrefixIndex()
    for worker, blocks in enumerate(held):
        index.store(str(worker), [CHAIN[i] for i in sorted(blocks)])
    found = index.match(CHAIN[:asked])
    for worker, depth in found.items():
        blocks = held[int(worker)]
        assert {0, depth - 1} <= blocks, "never more than what it holds where it was looked at"
        assert depth == asked or depth not in blocks
    assert found.keys() == {str(w) for w, blocks in enumerate(held) if 0 in blocks}


def test_nothing_asked_nothing_found() -> None:
    index = PrefixIndex()
    assert index.match([]) == index.match(CHAIN) == {}
    index.evict("unknown", CHAIN)
    index.clear("unknown")
    assert (index.entries, index.sweep(1)) == (0, False)


def test_a_removed_worker_matches_no_more_and_its_slot_waits_for_the_sweep() -> None:
    index = PrefixIndex()
    index.store("a", CHAIN)
    index.store("b", CHAIN[:100])
    assert index.match(CHAIN) == {"a": 300, "b": 100}
    index.clear("a")
    index.store("c", CHAIN[:50])
    assert index.match(CHAIN) == {"b": 100, "c": 50}
    assert index.entries == 300
    while index.sweep(10):
        assert index.match(CHAIN) == {"b": 100, "c": 50}
    assert index.entries == 100
    index.store("d", CHAIN[:7])
    assert index._slots.count == 3, "d has the slot that was a's"
    assert index.match(CHAIN) == {"b": 100, "c": 50, "d": 7}
    index.evict("d", CHAIN[:7])
    index.store("d", CHAIN)
    assert index.match(CHAIN) == {"b": 100, "c": 50, "d": 300}


def test_a_sweep_is_bounded_and_ends() -> None:
    index = PrefixIndex()
    index.store("a", chain(SHARDS * 20))
    index.clear("a")
    before, rounds = index.entries, 1
    while index.sweep(100):
        assert before - index.entries < 100 + 60, "a portion and what is left of its shard"
        before, rounds = index.entries, rounds + 1
    assert index.entries == 0
    assert rounds > SHARDS * 20 / 160
    small = PrefixIndex()
    assert index.memory_bytes == small.memory_bytes, "the tables shrink, too"


def test_slots_do_not_multiply_when_a_worker_clears_without_end() -> None:
    index = PrefixIndex()
    for _ in range(3000):
        index.store("a", CHAIN[:2])
        index.clear("a")
    assert index._slots.count < 600
    index.store("a", CHAIN[:3])
    assert index.match(CHAIN) == {"a": 3}


def test_it_takes_no_more_than_its_limit() -> None:
    index = PrefixIndex(max_blocks=10)
    index.store("a", CHAIN[:15])
    index.store("b", CHAIN[:12])
    assert (index.entries, index.passed_over) == (10, 7)
    assert index.match(CHAIN) == {"a": 10, "b": 10}


def test_an_estimate_of_its_memory() -> None:
    index = PrefixIndex()
    blocks = [random.randbytes(16) for _ in range(50_000)]
    for worker in range(20):
        index.store(str(worker), blocks)
    assert 90 < index.memory_bytes / index.entries < 160
