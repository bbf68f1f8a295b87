"""Which replica counts fit on the nodes, and which have to be confirmed."""

from __future__ import annotations

import pytest

from cluster.serve.replica_kinds import ReplicaKind
from cluster.serve.scale_limits import (
    MemoryRoom,
    NodeRoom,
    find_large_jumps,
    find_shortages,
    update_deadline,
)

NODES = [
    NodeRoom({"prefill": 10, "decode": 4, "router": 1}, gpus=2),
    NodeRoom({"prefill": 10, "decode": 4, "router": 1}, gpus=1),
]
RUNNING: dict[ReplicaKind, int] = {"prefill": 1, "decode": 1, "router": 1}
GIB = 2**30
MEMORY = MemoryRoom(8 * GIB, {"prefill": GIB, "decode": 2 * GIB, "router": GIB // 8})


def test_more_than_the_nodes_have_slots_for_is_a_shortage() -> None:
    (text,) = find_shortages(RUNNING, {"decode": 9}, NODES, 0.0, None)
    assert text == "decode=9: the nodes declare 8 baton_decode; at most decode=8 fits"
    (text,) = find_shortages(RUNNING, {"router": 3}, NODES, 1.0, None)
    assert "routers=2 fits" in text
    assert not find_shortages(RUNNING, {"decode": 8}, NODES, 0.0, None)


def test_workers_of_both_pools_share_the_gpus() -> None:
    assert not find_shortages(RUNNING, {"decode": 2}, NODES, 1.0, None)
    (text,) = find_shortages(RUNNING, {"decode": 3}, NODES, 1.0, None)
    assert text.startswith("4 workers: each takes 1 of a GPU, and the nodes have 3 GPUs; 3 workers")
    assert not find_shortages(RUNNING, {"decode": 8}, NODES, 0.3333, None)


def test_memory_is_for_all_that_grows_and_less_what_stops() -> None:
    assert not find_shortages(RUNNING, {"prefill": 9}, NODES, 0.0, MEMORY)
    (text,) = find_shortages(RUNNING, {"prefill": 20}, NODES, 0.0, MEMORY)
    assert text == (
        "prefill=20 needs 19.0 GiB of memory (prefill 1.0 GiB each), 8.0 GiB are free;"
        " at most prefill=9 fits"
    )
    (text,) = find_shortages(RUNNING, {"prefill": 9, "decode": 2}, NODES, 0.0, MEMORY)
    assert text.endswith("at most prefill=7 decode=2 fits")
    four: dict[ReplicaKind, int] = {"prefill": 1, "decode": 4, "router": 1}
    assert not find_shortages(four, {"prefill": 13, "decode": 2}, NODES, 0.0, MEMORY)


def test_all_kinds_that_do_not_fit_are_named_at_once() -> None:
    memory = MemoryRoom(GIB, MEMORY.each)
    wanted: dict[ReplicaKind, int] = {"prefill": 9, "router": 100}
    slots, text = find_shortages(RUNNING, wanted, NODES, 0.0, memory)
    assert slots.startswith("routers=100: the nodes declare 2")
    assert text.startswith("prefill=9 routers=100 needs 20.4 GiB of memory (prefill 1.0 GiB each,")
    assert text.endswith("1.0 GiB are free; at most prefill=2 routers=1 fits")


def test_sizes_of_which_none_fits_are_called_so() -> None:
    (text,) = find_shortages({}, {"decode": 1}, NODES, 0.0, MemoryRoom(GIB, MEMORY.each))
    assert text.endswith("1.0 GiB are free; not even one fits")


def test_fewer_replicas_always_fit() -> None:
    assert not find_shortages({"prefill": 99}, {"prefill": 50}, NODES, 0.0, MEMORY)


def test_a_jump_is_large_beyond_double_and_beyond_eight() -> None:
    assert find_large_jumps({"prefill": 1}, {"prefill": 8}) == []
    assert find_large_jumps({"prefill": 1}, {"prefill": 9}) == ["prefill"]
    assert find_large_jumps({"prefill": 10}, {"prefill": 20}) == []


def test_first_deployment_has_the_start_deadline() -> None:
    assert update_deadline((60, 35), {}, RUNNING, {"prefill": 0}, RUNNING) == (60, "")


@pytest.mark.parametrize(("surge", "batches"), [(0, 5), (1, 5), (4, 3), (10, 1)])
def test_update_deadline_allows_a_start_and_a_drain_per_batch(surge: int, batches: int) -> None:
    ten: dict[ReplicaKind, int] = {"decode": 10}
    within, why = update_deadline((60, 35), ten, ten, {"decode": surge}, ["decode"])
    assert within == 60 + batches * (60 + 35)
    assert why.startswith(f"replaced in {batches} batch")


def test_replicas_that_stay_or_only_stop_lengthen_no_deadline_by_starts() -> None:
    two: dict[ReplicaKind, int] = {"prefill": 2}
    assert update_deadline((60, 35), two, {"prefill": 3}, {"prefill": 1}, []) == (60, "")
    stops = update_deadline((60, 35), two, RUNNING, {"prefill": 1}, [])
    assert stops == (60 + 35, "of which 35 s for a drain")
