"""The cost of a placement, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.performance.speculation_profile import SpeculationProfile
from protocol.performance.step_model import (
    PRIOR_STEP_MODEL,
    StepModel,
    complete_step_model,
    mean_step_model,
    parse_step_model,
)
from router.placement.choose import find_longest_prefix, placement_candidates
from router.placement.cost import (
    LOCAL_PATH_S,
    PATH_S,
    decode_terms,
    find_fetch,
    objective_cost,
    prefill_terms,
    queued_prompts_s,
    remote_placements,
    usable_tokens,
)
from router.placement.snapshot import PrefixSource
from tests.router.snapshots import GOALS, MODEL, decode, network, prefill, query, snapshot


def test_a_missed_objective_outweighs_gains_below_it() -> None:
    assert [objective_cost(x) for x in (0.0, 0.5, 1.0, 1.1)] == pytest.approx([0, 0.5, 1.0, 2.1])


def test_the_last_token_is_always_computed_and_only_whole_blocks_are_cached() -> None:
    assert [usable_tokens(cached, 64) for cached in (0, 32, 64)] == [0, 32, 32]
    assert usable_tokens(64, 65) == 64


def test_terms_of_a_pair_by_hand() -> None:
    q = query(1000, output=101.0)
    p = prefill_terms(prefill("p", queue_s=0.3, cached=320), None, q, network(), GOALS)
    assert p.prefill_s == pytest.approx(2 * 0.01 + 0.68)  # two chunks of 680 tokens
    d = decode_terms(decode("d", batch=4, kv_used=2000, cached=96), q, GOALS, 100.0)
    assert d.step_s == pytest.approx(0.01 + 5e-4 + 1e-7 * (2000 + 1000 + 50.5))
    terms = remote_placements([p], d, q, network(bandwidth=1e6), GOALS)[0]
    assert terms.ttft_s == pytest.approx(PATH_S + 0.3 + 0.7)
    assert terms.wire_s == pytest.approx((1000 - 96) * 1000 / 1e6)
    tail_s = (680 - 512) * 1000 / 1e6
    ready_s = max(terms.ttft_s + tail_s, 0.3 + terms.wire_s)
    assert terms.ready_s == pytest.approx(ready_s)
    assert terms.tpot_s == pytest.approx((ready_s - terms.ttft_s) / 100 + d.step_s)


def test_kv_moves_once_there_is_room_which_may_come_while_the_prompt_is_computed() -> None:
    q = query(1000, output=101.0)
    p = prefill_terms(prefill("p", queue_s=0.3), None, q, network(), GOALS)
    d = decode_terms(decode("d"), q, GOALS, 100.0)
    wire_s = 0.1

    def ready_s(wait_s: float) -> float:
        [terms] = remote_placements([p], d._replace(wait_s=wait_s), q, network(1e7), GOALS)
        assert terms.wire_s == pytest.approx(wire_s)
        return terms.ready_s

    assert ready_s(0.0) == ready_s(0.3) == ready_s(1.2), "the prefill ends after 1.32 s"
    assert ready_s(1.5) == pytest.approx(1.5 + wire_s)


def test_a_prefix_is_not_computed_again_to_gain_little() -> None:
    """0.96 s of prompt at the holder's queue of 1 s, or at once elsewhere."""
    q, workers = query(1000), [prefill("p", queue_s=1.0, cached=960), prefill("r")]
    local = decode("d", batch=30, queue_s=60.0)

    def chosen(queue_s: float) -> str | None:
        shot = snapshot([workers[0]._replace(queue_s=queue_s), workers[1]], [local])
        return min(placement_candidates(q, shot, GOALS, None), key=lambda c: c.cost).prefill

    assert chosen(1.1) == "p"
    assert chosen(1.4) == "r"
    workers[0] = prefill("p", coming=960)
    assert chosen(1.1) == "p", "the prefix will be there by then"


def test_queued_prompts_share_steps_and_attend_to_their_own_tokens() -> None:
    model = StepModel(0.01, 0.0, 0.0, 2e-5, 1e-9)
    steps_s, tokens_s = 25 * 0.01, 100_000 * 2e-5
    fifty = queued_prompts_s(model, 100_000, 50, 4096)
    assert fifty == pytest.approx(steps_s + tokens_s + 50 * 1e-9 * 2000**2 / 2)
    one = queued_prompts_s(model, 100_000, 1, 4096)
    assert one == pytest.approx(model.prefill_s(0, 100_000, 4096))
    assert one > 3 * fifty
    assert queued_prompts_s(model, 100, 0, 4096) > 0, "an unknown number counts as one"


def test_transfers_under_way_share_the_link() -> None:
    q = query(1000)
    p = prefill_terms(prefill("p"), None, q, network(), GOALS)
    d = decode_terms(decode("d"), q, GOALS, 100.0)
    alone = remote_placements([p], d, q, network(), GOALS)[0].wire_s
    shared = remote_placements([p], d, q, network(active={("p", "d"): 2}), GOALS)[0].wire_s
    assert shared == pytest.approx(3 * alone)


def test_who_was_slower_than_predicted_is_predicted_slower() -> None:
    q = query(1000)
    d = decode_terms(decode("d"), q, GOALS, 100.0)
    workers = [prefill("p", correction=k) for k in (1.0, 1.5)]
    alone = [prefill_terms(w, None, q, network(), GOALS) for w in workers]
    terms = [remote_placements([p], d, q, network(), GOALS)[0] for p in alone]
    assert terms[1].ttft_s - PATH_S == pytest.approx(1.5 * (terms[0].ttft_s - PATH_S))


def test_a_full_worker_makes_wait_as_long_as_its_residents_take() -> None:
    q = query(1000)
    full = decode("d", batch=10, kv_used=99_500, kv_free=500)
    terms = decode_terms(full, q, GOALS, 100.0)
    assert not terms.fits
    turn_s = 100 * MODEL.decode_s(10, 99_500)
    assert terms.wait_s == pytest.approx((1100 - 500) / 99_500 * turn_s)


def test_the_wait_for_pages_depends_little_on_how_many_are_only_promised() -> None:
    """A burst of long prompts to a worker with one short chat was once refused: what had been
    promised took the room, but did not count among what leaves."""
    q, promised = query(1000), decode("d", batch=10, kv_free=0)
    waits = [
        decode_terms(promised._replace(kv_used=used), q, GOALS, 100.0).wait_s
        for used in (0, 1, 20, 50_000, 100_000)
    ]
    assert waits == sorted(waits) and 0 < waits[-1] < 2 * waits[0]
    turn_s = 100 * MODEL.decode_s(10, 0)
    assert waits[0] == pytest.approx(1100 / 100_000 * turn_s)


def test_what_is_promised_to_others_is_used_until_they_need_it() -> None:
    """Prompts of 0.1 s waited beside idle prefill workers and half-empty pools, because longer ones
    that were being computed had been promised the rest."""
    q, promised = query(1000), decode("d", batch=10, kv_free=0)
    found = [
        decode_terms(promised._replace(kv_unused=tokens), q, GOALS, 100.0)
        for tokens in (0, 1099, 1100, 50_000)
    ]
    waits = [terms.wait_s for terms in found]
    assert waits[0] == waits[1] > 0.0 == waits[2] == waits[3]
    assert not any(terms.fits for terms in found), "another worker has promised less"


def test_promised_tokens_evict_as_much_as_used_ones() -> None:
    q = query(1000)
    promised, used, empty = (
        decode_terms(decode("d", kv_used=used, kv_free=free), q, GOALS, 100.0).eviction
        for used, free in ((0, 40_000), (60_000, 40_000), (0, 100_000))
    )
    assert promised == used > empty == 0.0


def test_a_full_batch_makes_wait_for_a_row() -> None:
    crowd = decode("d", batch=128, rows=64, kv_used=10_000)
    terms = decode_terms(crowd, query(100), GOALS, 100.0)
    assert terms.wait_s == pytest.approx(65 / 64 * 100 * MODEL.decode_s(64, 10_000))


def test_residents_count_by_what_they_lose() -> None:
    few, many = (
        decode_terms(decode("d", batch=n), query(100), GOALS, 100.0).imposed for n in (2, 20)
    )
    assert many == pytest.approx(10 * few)
    near = decode_terms(decode("d", batch=20, kv_used=900_000), query(100), GOALS, 100.0)
    assert near.imposed > 5 * many, "there they miss their objective"


def test_steps_that_bring_several_tokens_are_shorter_for_each() -> None:
    q, crowd = query(100), decode("d", batch=20, kv_used=90_000, kv_free=50)
    plain = decode_terms(crowd, q, GOALS, 100.0)
    drafts = SpeculationProfile(accept=(1.0, 0.5))  # that cost nothing
    fast = decode_terms(crowd._replace(speculation=drafts), q, GOALS, 100.0)
    assert fast.step_s == pytest.approx(plain.step_s / 2.5)
    assert fast.wait_s == pytest.approx(plain.wait_s / 2.5), "residents leave sooner"


def test_drafts_that_rows_cost_do_not_shorten_the_steps_of_a_crowd() -> None:
    drafts = SpeculationProfile(accept=(0.8,) * 4, row_s=5e-4)
    steps = [
        [
            decode_terms(decode("d", batch=n)._replace(speculation=s), query(100), GOALS, 100.0)
            for s in (None, drafts)
        ]
        for n in (1, 60)
    ]
    few, many = [plain.step_s / fast.step_s for plain, fast in steps]
    assert few > 1.5 and many == 1.0


def test_a_prompt_computed_among_residents_stalls_them() -> None:
    def local(batch: int) -> tuple[float, float]:
        shot = snapshot([], [decode("d", batch=batch)])
        [only] = placement_candidates(query(400), shot, GOALS, None)
        return only.ttft_s, only.imposed - only.p.delay

    assert local(0) == (pytest.approx(LOCAL_PATH_S + 0.41), 0.0)
    assert local(10)[0] > local(0)[0]
    assert local(20)[1] > local(10)[1] > 0


def test_a_fetch_only_where_it_beats_computing() -> None:
    q, best = query(1000), PrefixSource("s", 960)
    fetch = find_fetch(prefill("p"), best, q, network())
    assert fetch is not None
    assert (fetch.source, fetch.tokens) == ("s", 960)
    assert fetch.seconds == pytest.approx(PATH_S + 960 * 1000 / 1e9)
    assert find_fetch(prefill("s"), best, q, network()) is None
    assert find_fetch(prefill("p", cached=960), best, q, network()) is None
    assert find_fetch(prefill("p"), best, q, network(bandwidth=1e6)) is None, "too slow a link"
    assert find_fetch(prefill("p"), None, q, network()) is None


def test_a_fetch_from_a_busy_worker_waits_for_its_step() -> None:
    busy, idle = prefill("busy", queue_s=9.0, cached=960), decode("idle", cached=960)
    best = find_longest_prefix(snapshot([busy], [decode("d")]))
    assert best is not None and best.instance == "busy"
    step_s = busy.model.prefill_s(0, busy.chunk, busy.chunk)
    fetch = find_fetch(prefill("p"), best, query(1000), network())
    assert fetch is not None and fetch.seconds == pytest.approx(PATH_S + step_s + 960 * 1000 / 1e9)
    short = find_longest_prefix(snapshot([busy._replace(cached=64)], [decode("d")]))
    assert find_fetch(prefill("p"), short, query(100), network()) is None, "computing is sooner"
    free = find_longest_prefix(snapshot([busy], [idle, decode("d")]))
    assert free is not None and (free.instance, free.wait_s) == ("idle", 0.0)


def test_a_fetch_goes_on_while_the_queue_is_worked_off() -> None:
    best = PrefixSource("s", 960)
    terms = prefill_terms(prefill("p", queue_s=0.5), best, query(1000), network(), GOALS)
    assert terms.ttft_s == pytest.approx(0.5 + 0.01 + 0.04)


counts = st.integers(0, 200_000)


@given(
    tokens=st.integers(1, 20_000),
    output=st.floats(2, 1000),
    queue=st.floats(0, 100),
    held=st.tuples(counts, counts),
    batch=st.integers(0, 200),
    used=st.integers(0, 100_000),
    bandwidth=st.floats(1e5, 1e11),
)
def test_predictions_add_up_whatever_the_load(
    tokens: int,
    output: float,
    queue: float,
    held: tuple[int, int],
    batch: int,
    used: int,
    bandwidth: float,
) -> None:
    workers = [prefill("p", queue_s=queue, cached=held[0]), prefill("r")]
    d = decode("d", batch=batch, kv_used=used, kv_free=100_000 - used, cached=held[1])
    shot = snapshot(workers, [d], network(bandwidth))
    for c in placement_candidates(query(tokens, output), shot, GOALS, find_longest_prefix(shot)):
        t = c.terms
        assert all(math.isfinite(x) and x >= 0 for x in t.values())
        assert t["cost"] == pytest.approx(
            t["ttft_cost"] + t["tpot_cost"] + t["imposed"] + t["eviction"]
        )
        assert t["ttft_cost"] == pytest.approx(objective_cost(t["ttft_s"] / GOALS.ttft_s))
        assert t["ready_s"] >= t["ttft_s"] >= t["prefill_s"]
        assert c.p.cached < tokens and c.d.cached < tokens


def test_what_a_worker_does_not_know_is_taken_from_the_others() -> None:
    prefills = StepModel(0.02, 0.0, 0.0, 1e-3, 1e-8)
    decodes = StepModel(0.01, 1e-4, 1e-7, 0.0, 0.0)
    others = mean_step_model([prefills, decodes, None])
    assert complete_step_model(decodes, others)[3:] == prefills[3:]
    completed = complete_step_model(prefills, others)
    assert (completed.row, completed.kv_token) == (decodes.row, decodes.kv_token)
    assert completed.prefill_s(0, 1000, 512) == prefills.prefill_s(0, 1000, 512)
    assert complete_step_model(None, others) == others
    assert mean_step_model([]) == PRIOR_STEP_MODEL
    assert complete_step_model(decodes, mean_step_model([decodes]))[3:] == PRIOR_STEP_MODEL[3:]


@pytest.mark.parametrize("bad", [(), (1.0,), (1.0, 1.0, 1.0, 1.0, -1.0), (math.nan,) * 5])
def test_a_model_that_cannot_be_one_is_none(bad: tuple[float, ...]) -> None:
    assert parse_step_model(bad) is None
