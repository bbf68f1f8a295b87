"""The choice: golden cases, each with what should be weighed in it."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from random import Random

import pytest

from bench.lib.routing_policies import POLICIES, RoundRobin, least_loaded, overlap_only
from router.placement.choose import (
    MAX_PREFILL_CANDIDATES,
    NEAR_BEST,
    PRESELECTED,
    ChoosePlacement,
    PlacementChoice,
    choose_placement,
    preselect_workers,
)
from router.placement.ledger import WorkLedger
from router.placement.snapshot import DecodeState, PrefillState
from tests.router.snapshots import GOALS, decode, network, prefill, query, snapshot

SLOW = network(bandwidth=1e6)  # a fetch never pays


def pick(
    prefills: list[PrefillState], decodes: list[DecodeState], tokens: int, seed: int = 0
) -> PlacementChoice:
    choice = choose_placement(query(tokens), snapshot(prefills, decodes, SLOW), GOALS, Random(seed))
    assert choice is not None
    return choice


def busy_decode() -> DecodeState:
    """One on which nobody would compute a prompt."""
    return decode("d", batch=30, queue_s=60.0)


@pytest.mark.parametrize(("queue_s", "wanted"), [(0.0, "a"), (1.5, "a"), (2.0, "b"), (9.0, "b")])
def test_a_long_cached_prefix_is_worth_its_computing_and_no_more(
    queue_s: float, wanted: str
) -> None:
    """1920 of 2000 tokens are cached at ``a``: 1.95 s, chunks included."""
    workers = [prefill("a", cached=1920, queue_s=queue_s), prefill("b")]
    assert pick(workers, [busy_decode()], 2000).chosen.prefill == wanted


def test_a_hot_prefix_spreads_and_the_others_stay_where_they_are() -> None:
    """Every request for the prefix lengthens its holder's queue, until the next worker pays."""
    books = WorkLedger(lambda: 0.0)
    held = {"a": 1920}
    used: Counter[str] = Counter()
    for _ in range(12):
        workers = []
        for name in ("a", "b", "c"):
            queue = books.queues.get(name)
            queue_s = queue.seconds(0) if queue else 0.0
            workers.append(prefill(name, cached=held.get(name, 0), queue_s=queue_s))
        chosen = pick(workers, [busy_decode()], 2000).chosen
        assert chosen.prefill is not None
        used[chosen.prefill] += 1
        held[chosen.prefill] = 1920
        seconds = chosen.p.prefill_s
        books.open(chosen.prefill, "d", tokens=80, seconds=seconds, kv_tokens=0, priority=0)
    assert used["a"] > max(used["b"], used["c"])
    elsewhere = [prefill("a", cached=0, queue_s=9.0), prefill("b", cached=1920)]
    assert pick(elsewhere, [busy_decode()], 2000).chosen.prefill == "b"


def test_the_hot_prefix_reaches_every_worker_in_the_end() -> None:
    queues = {"a": 0.0, "b": 0.0, "c": 0.0}
    held = {"a": 1920}
    for _ in range(80):
        workers = [prefill(n, cached=held.get(n, 0), queue_s=queues[n]) for n in queues]
        chosen = pick(workers, [busy_decode()], 2000).chosen
        assert chosen.prefill is not None
        queues[chosen.prefill] += chosen.p.prefill_s
        held[chosen.prefill] = 1920
    assert set(held) == {"a", "b", "c"}
    assert max(queues.values()) < 1.3 * min(queues.values())


def test_short_prompts_go_local_and_long_ones_do_not() -> None:
    def computes(batch: int, tokens: int) -> str | None:
        return pick([prefill("p")], [decode("d", batch=batch)], tokens).chosen.prefill

    assert computes(1, 4) is None
    assert computes(4, 1000) == "p"
    assert computes(40, 4) == "p", "forty wait for it"


def test_a_decode_worker_with_time_to_spare_computes_while_requests_wait_for_prefill_workers() -> (
    None
):
    def computes(awaiting: int, batch: int = 8) -> str | None:
        decodes = [decode("d", batch=batch)]
        worker = prefill("p", queue_s=0.05, awaiting=awaiting)
        return pick([worker], decodes, 300).chosen.prefill

    assert computes(0) == computes(1) == "p"
    assert computes(10) is None
    assert computes(10, batch=60) == "p", "sixty residents lose more than ten others wait"
    assert computes(10_000, batch=60) == "p", "these are late in any case"


def test_requests_that_wait_do_not_make_a_prefix_be_computed_twice() -> None:
    """The next one of them is computed after its prefix as soon as that is there."""
    decodes = [decode("d", batch=40)]
    workers = [prefill("p", queue_s=2.0, coming=2000, awaiting=7), prefill("q")]
    placements = [pick(workers, decodes, 2050, seed).chosen for seed in range(9)]
    assert {chosen.prefill for chosen in placements} == {"p"}


def test_a_long_prompt_goes_local_where_it_is_cached() -> None:
    decodes = [decode("d", cached=1984, batch=1), decode("e")]
    chosen = pick([prefill("p", queue_s=0.5)], decodes, 2000).chosen
    assert (chosen.prefill, chosen.decode) == (None, "d")


def test_without_prefill_workers_it_is_local() -> None:
    assert pick([], [decode("d")], 2000).chosen.prefill is None


def test_only_missing_blocks_travel() -> None:
    decodes = [decode("d"), decode("e", cached=1600, batch=1)]
    workers = [prefill("p", cached=1600)]
    chosen = pick(workers, decodes, 2000).chosen
    assert (chosen.decode, chosen.d.cached) == ("e", 1600)


def test_a_full_decode_worker_is_avoided_and_taken_when_there_is_no_other() -> None:
    full = decode("full", kv_used=99_900, kv_free=100, batch=1)
    crowd = decode("crowd", batch=40, kv_used=40_000, kv_free=60_000)
    assert pick([prefill("p")], [full, crowd], 500).chosen.decode == "crowd"
    assert pick([prefill("p")], [full], 500).chosen.decode == "full"


def test_no_decode_worker_no_choice() -> None:
    assert choose_placement(query(10), snapshot([prefill("p")], []), GOALS, Random(0)) is None


def test_a_peer_is_asked_when_that_beats_computing() -> None:
    shot = snapshot([prefill("a", cached=1920, queue_s=5.0), prefill("b")], [busy_decode()])
    choice = choose_placement(query(2000), shot, GOALS, Random(0))
    assert choice is not None
    assert choice.chosen.prefill == "b"
    assert choice.chosen.p.fetch is not None
    assert (choice.chosen.p.fetch.source, choice.chosen.p.fetch.tokens) == ("a", 1920)


def test_the_next_turn_finds_the_answer_at_its_decode_worker() -> None:
    """D has prompt and answer; P computes the rest after fetching them, or D does it itself."""
    shot = snapshot([prefill("p")], [decode("d", cached=1920, batch=30, queue_s=5.0), decode("e")])
    choice = choose_placement(query(3000), shot, GOALS, Random(0))
    assert choice is not None
    assert choice.chosen.p.fetch is not None
    assert choice.chosen.p.fetch.source == "d"


def test_among_the_near_best_the_less_loaded() -> None:
    near = [decode("d", batch=3), decode("e", batch=2)]
    chosen = {pick([prefill("p")], near, 1000, seed).chosen.decode for seed in range(20)}
    assert chosen == {"e"}
    costs = {c.decode: c.cost for c in pick([prefill("p")], near, 1000).considered}
    assert abs(costs["d"] / costs["e"] - 1) < NEAR_BEST


def test_equals_are_shared_out_by_chance() -> None:
    workers = [prefill(f"p{i}") for i in range(6)]
    used = Counter(pick(workers, [busy_decode()], 1000, seed).chosen.prefill for seed in range(300))
    assert len(used) == 6
    assert max(used.values()) < 3 * min(used.values())


def test_two_routers_draw_differently() -> None:
    workers = [prefill(f"p{i}") for i in range(8)]
    chances = Random(1), Random(2)
    shot = snapshot(workers, [busy_decode()])
    drawn = [
        [
            choice.chosen.prefill
            for _ in range(8)
            if (choice := choose_placement(query(1000), shot, GOALS, c))
        ]
        for c in chances
    ]
    assert drawn[0] != drawn[1]


def test_others_are_for_the_same_decode_worker_best_first() -> None:
    workers = [prefill(f"p{i}", queue_s=i / 2) for i in range(6)]
    choice = pick(workers, [busy_decode(), decode("e", batch=60)], 1000)
    assert choice.chosen.prefill == "p0"
    assert [c.prefill for c in choice.others] == ["p1", "p2"]
    assert {c.decode for c in choice.others} == {choice.chosen.decode}
    assert len(choice.others) == MAX_PREFILL_CANDIDATES - 1


def test_holders_and_idle_ones_are_both_looked_at() -> None:
    holders = [prefill(f"h{i}", cached=32 * (i + 1), queue_s=9.0) for i in range(20)]
    idle = [prefill(f"i{i}", queue_s=i / 100) for i in range(20)]
    by_queue = attrgetter("reusable"), attrgetter("queue_s")
    names = [w.instance for w in preselect_workers([*holders, *idle], *by_queue)]
    assert names == ["h19", "h18", "h17", "h16", "i0", "i1", "i2", "i3"]
    assert len(preselect_workers(idle, *by_queue)) == PRESELECTED


def test_decode_workers_that_few_long_contexts_fill_do_not_hide_those_with_room() -> None:
    """Eight of them once took all places, and the whole queue waited for their KV."""
    long = [decode(f"l{i}", batch=3, kv_used=99_000, kv_free=1000) for i in range(PRESELECTED)]
    crowd = [decode(f"c{i}", batch=4, rows=4) for i in range(PRESELECTED)]  # without a free row
    short = [decode(f"s{i}", batch=12, kv_used=12_000, kv_free=88_000) for i in range(2)]
    chosen = pick([prefill("p")], [*long, *crowd, *short], 4000).chosen
    assert chosen.decode in ("s0", "s1") and chosen.d.wait_s == 0.0
    holders = [w._replace(own=w.own._replace(cached=3520)) for w in long[:6]]
    considered = pick([prefill("p")], [*crowd, *holders], 4000).considered
    assert {w.instance for w in holders} <= {c.decode for c in considered}, "480 tokens fit"


def test_decode_workers_are_preselected_by_load_relative_to_their_rows() -> None:
    small = [decode(f"small{i}", batch=7, rows=8) for i in range(PRESELECTED)]
    large = [decode(f"large{i}", batch=16, rows=256) for i in range(PRESELECTED)]
    considered = pick([prefill("p")], [*small, *large], 1000).considered
    assert {c.decode for c in considered} == {worker.instance for worker in large}


def sequence(policy: ChoosePlacement, count: int) -> list[tuple[str | None, str]]:
    prefills = [prefill("p0", queue_s=1.0, cached=320), prefill("p1"), prefill("p2", queue_s=2.0)]
    decodes = [decode("d0", batch=5, cached=320), decode("d1", batch=1)]
    picked = []
    for _ in range(count):
        choice = policy(query(1000), snapshot(prefills, decodes), GOALS, Random(0))
        assert choice is not None
        assert choice.chosen in choice.considered
        picked.append((choice.chosen.prefill, choice.chosen.decode))
    return picked


def test_simple_policies() -> None:
    assert sequence(RoundRobin(), 4) == [("p0", "d0"), ("p1", "d1"), ("p2", "d0"), ("p0", "d1")]
    assert sequence(least_loaded, 1) == [("p1", "d1")]
    assert sequence(overlap_only, 1) == [("p0", "d0")]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_without_workers(name: str) -> None:
    policy = POLICIES[name]
    assert policy(query(10), snapshot([prefill("p")], []), GOALS, Random(0)) is None
    alone = policy(query(10), snapshot([], [decode("d")]), GOALS, Random(0))
    assert alone is not None
    assert (alone.chosen.prefill, alone.chosen.decode, alone.others) == (None, "d", [])


def test_a_session_goes_where_it_was_if_that_costs_about_the_same() -> None:
    def chosen(session_queue_s: float, familiar: tuple[str, ...]) -> str | None:
        workers = [prefill("p"), prefill("known", queue_s=session_queue_s)]
        shot = snapshot(workers, [busy_decode()], SLOW)
        asked = query(1000)._replace(familiar=familiar)
        choice = choose_placement(asked, shot, GOALS, Random(0))
        assert choice is not None
        return choice.chosen.prefill

    assert chosen(0.08, ()) == "p", "it has no queue"
    assert chosen(0.08, ("known", "d")) == "known"
    assert chosen(0.5, ("known", "d")) == "p", "a hint is not worth a queue"


def test_less_loaded_workers_are_drawn_more_often() -> None:
    near = [decode("d", batch=32), decode("e", batch=28)]
    used = Counter(pick([prefill("p")], near, 1000, seed).chosen.decode for seed in range(400))
    assert 1.1 < used["e"] / used["d"] < 2.0
