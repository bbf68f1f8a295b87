"""Prefixes on their way: siblings of a cold prompt wait for the first one, on its worker."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.block_keys import BLOCK_TOKENS, block_keys
from protocol.performance.step_model import StepModel
from protocol.requests import Request
from router.generation.choice_turn import ChoiceTurn, RequestEntry
from router.generation.placer import PlacedRequest, Placer
from router.placement.admission import AdmissionLimits
from router.placement.choose import choose_placement
from router.placement.estimates import RoutingEstimates
from router.placement.expected_prefixes import LINGER_S, SAMPLE_BLOCKS, ExpectedPrefixes
from router.placement.ledger import DecodeLoad, PlacementTicket, WorkLedger
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives, RequestOrigin
from router.tenants.tenant import Tenant
from tests.router.fairness.test_dispatcher import Router

ROOT = b"r" * 16
MODEL = StepModel(step=0.01, row=1e-4, kv_token=1e-7, prompt_token=1e-4, prompt_pair=0.0)
COLD = 50_000
"""Tokens of a prompt that takes six seconds."""


@pytest.fixture(autouse=True)
def choose_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.placer.choose_placement", choose_placement)


def keys_of(*parts: tuple[int, int]) -> list[bytes]:
    """Block keys of a prompt of (token, count) parts."""
    return block_keys(ROOT, [token for token, count in parts for _ in range(count)])


class SiblingPool:
    """Idle workers as the placer sees them, and the turns of requests in one router."""

    def __init__(self, prefills: int = 8, decodes: int = 8) -> None:
        prefill = {name: self._record(name) for name in (f"p{i}" for i in range(prefills))}
        links = {name: self._link(name) for name in (f"d{i}" for i in range(decodes))}
        self.router = Router()
        self.ledger = self.router.ledger
        self.index = PrefixIndex()
        pool: Any = SimpleNamespace(
            links=links,
            prefill=prefill,
            model=None,
            routers=1,
            record=lambda name: prefill.get(name) or links[name].record,
            step_model=lambda name: MODEL,
            serves_beside=lambda link: False,
        )
        goals = Objectives(20.0, 0.5)
        self.placer = Placer(pool, self.index, self.ledger, RoutingEstimates(), goals)
        self.placer._rng = random.Random(1)
        self.placed: list[PlacedRequest] = []
        self.tickets: list[PlacementTicket] = []

    @staticmethod
    def _record(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            instance=name, endpoint="h:1", draining=False, prefill_chunk=512, max_batch=64
        )

    def _link(self, name: str) -> SimpleNamespace:
        load = DecodeLoad(0, 0, 0, 1_000_000, 1_000_000)
        return SimpleNamespace(
            record=self._record(name), ready=True, down=False, busy=False, load=lambda: load
        )

    def enter(
        self, prompt: list[int], entry: RequestEntry | None = None, priority: int = 0
    ) -> None:
        """Let one choice enter; without ``entry`` it is a request of its own. Raises ApiError."""
        request = Request(id="r", prompt=tuple(prompt), priority=priority)
        turn = ChoiceTurn(
            *(self.router.dispatcher, self.placer, request, block_keys(ROOT, prompt)),
            *(Tenant("a"), RequestOrigin()),
            *(self._submit, lambda error: pytest.fail(error.message)),
        )
        turn.enter(self.router.clock.now, entry or RequestEntry(AdmissionLimits(20.0)))

    def _submit(self, placed: PlacedRequest, older_s: float) -> None:
        self.placed.append(placed)
        self.tickets.append(self.placer.open_ticket(placed, f"r{len(self.tickets)}"))

    @property
    def computing(self) -> list[str]:
        return [placed.choice.chosen.p.instance for placed in self.placed]


@pytest.mark.parametrize("workers", [1, 8])
def test_eight_agents_with_one_cold_prompt_are_let_in_and_go_to_one_worker(workers: int) -> None:
    pool = SiblingPool(workers, workers)
    for agent in range(8):
        pool.enter([5] * COLD + [100 + agent] * 30)
    assert len(pool.placed) == 8, "nothing waits in the router"
    assert len(set(pool.computing)) == 1
    assert sum(placed.query.tokens - placed.choice.chosen.p.cached for placed in pool.placed) < (
        COLD + 8 * 64
    )
    first_s = pool.placed[0].choice.chosen.ttft_s
    assert all(first_s < placed.choice.chosen.ttft_s < 1.1 * first_s for placed in pool.placed[1:])


@pytest.mark.parametrize("prefills", [0, 1, 4])
def test_choices_of_one_request_are_one_group(prefills: int) -> None:
    pool, entry = SiblingPool(prefills), RequestEntry(AdmissionLimits(20.0))
    for _ in range(8):
        pool.enter([5] * COLD, entry)
    assert len(pool.placed) == 8 and len(set(pool.computing)) == 1


def test_siblings_are_computed_elsewhere_where_that_is_sooner() -> None:
    pool = SiblingPool()
    pool.enter([5] * 4000)
    pool.ledger.queue(pool.computing[0]).add(80_000, 8.0, 0)
    pool.enter([5] * 4000)
    assert pool.computing[0] != pool.computing[1], "0.4 s of compute against 8 s of queue"


def test_more_urgent_request_does_not_wait_for_a_less_urgent_prefix() -> None:
    pool = SiblingPool()
    pool.enter([5] * COLD)
    pool.enter([5] * COLD, priority=-5)
    assert pool.placed[1].choice.chosen.p.cached == 0
    pool.enter([5] * COLD, priority=3)
    assert pool.placed[2].choice.chosen.p.cached > 0


def test_prompts_without_a_common_prefix_spread_over_all_workers() -> None:
    pool = SiblingPool()
    for agent in range(8):
        pool.enter([100 + agent] * COLD)
    assert len(set(pool.computing)) == 8


def test_a_short_prompt_goes_to_a_busy_worker_and_is_predicted_to_share_its_next_step() -> None:
    """Steps of 512 tokens take 61 ms. Each of the two workers has a prompt of ten steps, one more
    waits for them, and each short prompt goes to the worker that has none."""
    pool = SiblingPool(1, 1)
    for number in range(3):
        pool.enter([number] * 5000)
    assert len(pool.placed) == 2 and pool.router.dispatcher.queue.length == 1
    for number in range(2):
        pool.enter([10 + number] * 40)
    assert len(pool.placed) == 4 and pool.router.dispatcher.queue.length == 1
    assert sorted(pool.computing[2:]) == ["d0", "p0"]
    for chosen in (placed.choice.chosen for placed in pool.placed[2:]):
        assert chosen.p.is_short and chosen.p.queue_s == 0
        assert chosen.ttft_s == pytest.approx(1.5 * 0.061 + 0.014, abs=0.005)
    pool.enter([20] * 600)
    assert len(pool.placed) == 4, "it is not short, and waits"


def test_first_token_makes_it_cached_at_once_and_the_second_one_at_the_decode_worker() -> None:
    pool = SiblingPool(decodes=2)
    pool.enter([5] * COLD)
    [ticket], chosen = pool.tickets, pool.placed[0].choice.chosen
    keys = block_keys(ROOT, [5] * COLD)
    assert not pool.placer._view(keys, 0, COLD).cached
    ticket.on_tokens()
    assert set(pool.placer._view(keys, 0, COLD).cached) == {chosen.p.instance}
    ticket.on_tokens()
    assert set(pool.placer._view(keys, 0, COLD).cached) == {chosen.p.instance, chosen.decode}
    pool.router.wait(LINGER_S + 0.1)
    assert not pool.placer._view(keys, 0, COLD).cached, "the events should have come"


def test_an_attempt_that_ends_before_its_first_token_leaves_nothing() -> None:
    ledger = WorkLedger(lambda: 0.0)
    keys = keys_of((5, 1000))
    terms: dict[str, Any] = {"tokens": 1000, "seconds": 1.0, "kv_tokens": 1000, "priority": 0}
    ticket = ledger.open("p", "d", **terms, keys=keys)
    assert set(ledger.expected.match(keys)) == {"p"} and len(ledger.expected)
    ticket.release()
    ticket.release()
    assert not ledger.expected.match(keys) and not len(ledger.expected)


def test_longest_common_prefix_is_found_for_each_worker() -> None:
    expected = ExpectedPrefixes(lambda: 0.0)
    blocks = 40
    for instance, shared in {"a": 40, "b": 17, "c": 7, "d": 0}.items():
        parts = (5, shared * BLOCK_TOKENS), (6, (blocks - shared) * BLOCK_TOKENS)
        expected.add(instance, keys_of(*parts), 1, 0.0)
    found = expected.match(keys_of((5, blocks * BLOCK_TOKENS)))
    assert {name: count for name, (count, _) in found.items()} == {"a": 40, "b": 17, "c": 7}
    assert not expected.match([])


def test_remembered_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.expected_prefixes.MAX_SAMPLES", 10)
    expected = ExpectedPrefixes(lambda: 0.0)
    for token in range(100):
        expected.add("p", keys_of((token, 2 * SAMPLE_BLOCKS * BLOCK_TOKENS)), 1, 0.0)
    assert len(expected) <= 10 + 2


def test_a_sibling_knows_the_prefix_after_the_first_request_has_left() -> None:
    ledger = WorkLedger(lambda: 0.0)
    keys = keys_of((5, 1000))
    terms: dict[str, Any] = {"seconds": 1.0, "kv_tokens": 1000, "priority": 0, "keys": keys}
    first, second = (ledger.open("p", "d", tokens=n, **terms) for n in (1000, 8))
    assert ledger.expected.match(keys)["p"][1] is first.prefix, "it is the one that is computed"
    first.release()
    blocks, prefix = ledger.expected.match(keys)["p"]
    assert (blocks, prefix) == (len(keys), second.prefix) and not prefix.computed
    second.on_tokens()
    assert ledger.expected.match(keys)["p"][1].computed
    assert len(ledger.expected)


def test_a_sibling_that_is_computed_first_makes_what_it_shares_cached() -> None:
    now = 0.0
    expected = ExpectedPrefixes(lambda: now)
    shared = 4 * SAMPLE_BLOCKS * BLOCK_TOKENS
    long, short = keys_of((5, 2 * shared)), keys_of((5, shared))
    first, second = (expected.add("p", keys, 1000, 0.0) for keys in (long, short))
    expected.on_computed(second)
    assert expected.match(short)["p"] == (len(short), second)
    assert expected.match(long)["p"] == (len(long), first), "what follows is still computed"
    now = LINGER_S
    assert expected.match(short)["p"] == (len(short), first)
    expected.drop(first)
    assert not len(expected) and not expected._by_key and not expected._siblings


def test_after_a_computed_sibling_the_next_computed_one_is_known() -> None:
    now = 0.0
    expected, keys = ExpectedPrefixes(lambda: now), keys_of((5, 1000))
    first, _, third = (expected.add("p", keys, 1000, 0.0) for _ in range(3))
    expected.on_computed(first)
    now = LINGER_S / 2
    expected.on_computed(third)
    now = LINGER_S
    assert expected.match(keys)["p"][1] is third


def test_siblings_leave_nothing_in_whatever_order_they_end() -> None:
    now, rng = 0.0, random.Random(3)
    expected = ExpectedPrefixes(lambda: now)
    for _ in range(20):
        prefixes = []
        for sibling in range(8):
            parts = (5, rng.randrange(2000)), (6 + sibling, rng.randrange(600))
            prefixes.append(expected.add(rng.choice("ab"), keys_of(*parts), 1, 0.0))
        rng.shuffle(prefixes)
        for prefix in prefixes:
            if rng.random() < 0.5:
                expected.on_computed(prefix)
            else:
                expected.drop(prefix)
            for keys in (p.keys for p in prefixes):
                for instance, (_, found) in expected.match(keys).items():
                    assert found.instance == instance and found.sampled
        now += LINGER_S
        assert not expected.match(keys_of((5, 2000))) and not len(expected)
        assert not expected._by_key and not expected._siblings


def test_siblings_count_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.expected_prefixes.MAX_SAMPLES", 10)
    expected = ExpectedPrefixes(lambda: 0.0)
    keys = keys_of((5, 2 * SAMPLE_BLOCKS * BLOCK_TOKENS))
    prefixes = [expected.add("p", keys, 1, 0.0) for _ in range(100)]
    assert len(expected) == 10 == sum(len(prefix.sampled) for prefix in prefixes)
    other = ExpectedPrefixes(lambda: 0.0)
    assert sum(bool(other.add("p", keys[:1], 1, 0.0).sampled) for _ in range(100)) == 5
    for prefix in prefixes:
        expected.drop(prefix)
    assert not len(expected)
