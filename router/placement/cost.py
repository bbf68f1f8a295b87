"""The predicted cost of a placement: pure functions of a snapshot, in seconds, tokens and bytes.

    u      = n - m_p                            uncached tokens at P
    TTFT   = path + k*(max(queue, fetch) + prefill(m_p, u))      k: observed over predicted
    ready  = max(TTFT + tail/bw, max(queue, room) + bytes/bw)     room: pages and a row at D
    TPOT   = (ready - TTFT + (E[out] - 1)*step/tau) / (E[out] - 1)     tau: tokens of a step at D
    cost   = h(TTFT/TTFT_SLO) + h(TPOT/TPOT_SLO) + delay imposed on others + eviction
    h(x)   = x + 10*max(0, x - 1)               a missed objective outweighs any gain below it

Others are D's residents, whose steps get longer, and the prompts that will queue at P behind this
one. Of those that wait in routers for P, each is delayed by the whole prompt, or else, by Little's
law, one that comes while this request waits behind it. So decode workers with time to spare compute
prompts before prefill workers are so late that requests are refused.

KV moves only once D has pages and a row for it, which it may have before the prefill begins.

The terms of P alone (``PrefillTerms``) and of D alone (``DecodeTerms``) are computed once per
worker, so that a pair costs a few operations. Local prefill is P = D without a transfer, and with
the stall that the worker's residents see. Fetching the prefix from a peer replaces computing it
where that is sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.speculation_profile import decode_pace
from protocol.performance.step_model import StepModel
from router.placement.snapshot import (
    DecodeState,
    LinkEstimates,
    Objectives,
    PlacementQuery,
    PrefillState,
    PrefixFetch,
    PrefixSource,
)

MISS_WEIGHT = 10.0
PATH_S, LOCAL_PATH_S = 0.004, 0.001
"""Latency to P or D and back without queue and compute, before any measurement."""
URGENT_TTFT_SHARE = 0.25
LARGEST_BUDGET_SHARE = 0.95
LEAST_PROMPT_SHARE = 0.25
"""Constants of ``decode_step_budget_s`` in engine/scheduling/step_policy.py, which this folder must
not import."""
BESIDE_STEPS = 1.5
"""Steps until a short prompt is computed beside longer ones: half of one is running."""
REUSE_SHARE = 0.1
"""Share of evicted tokens that will have to be computed again."""
DELAY_SHARE = 0.25
"""Seconds that later prompts wait for each second of a prompt's compute: at utilisation rho, rho
prompts of its size arrive meanwhile, and wait for half of it; rho is 1/2 here."""
FETCH_GAIN = 0.9
"""A fetch must bring the first token within this share of the time without it."""


class PrefillTerms(NamedTuple):
    """Prediction for one prefill worker, independent of the decode worker."""

    instance: str
    cached: int
    fetch: PrefixFetch | None
    queue_s: float
    prefill_s: float
    ttft_s: float  # without the path
    correction: float
    tail: int  # tokens of the last chunk: their KV is still to be sent when the first token is out
    load: float  # its queue, as a share of the objective
    delay: float = 0.0  # cost of what it delays: prompts that queue at P later
    is_short: bool = False  # P computes it beside longer prompts
    congestion: float = 0.0  # cost of what it delays: requests that wait in routers for P


class DecodeTerms(NamedTuple):
    """Prediction for one decode worker, independent of the prefill worker."""

    instance: str
    cached: int
    missing: int  # tokens whose KV it lacks
    batch: int
    busy: float  # its batch, as a share of the rows
    step_s: float  # seconds per token of each sequence
    wait_s: float  # for pages and a row
    imposed: float
    eviction: float
    fits: bool


class Placement(NamedTuple):
    """One candidate. ``prefill`` is None where D computes the prompt itself."""

    prefill: str | None
    p: PrefillTerms  # of the worker that computes the prompt
    d: DecodeTerms
    load: float
    ttft_s: float
    wire_s: float
    ready_s: float
    tpot_s: float
    ttft_cost: float
    tpot_cost: float
    imposed: float
    cost: float

    @property
    def decode(self) -> str:
        return self.d.instance

    @property
    def terms(self) -> dict[str, float]:
        """Return all terms for an explanation. ``cost`` is the sum of the four before it."""
        p, d = self.p, self.d
        return {
            "queue_s": p.queue_s,
            "fetch_s": p.fetch.seconds if p.fetch else 0.0,
            "prefill_s": p.prefill_s,
            "ttft_s": self.ttft_s,
            "wire_s": self.wire_s,
            "wait_s": d.wait_s,
            "ready_s": self.ready_s,
            "step_s": d.step_s,
            "tpot_s": self.tpot_s,
            "ttft_cost": self.ttft_cost,
            "tpot_cost": self.tpot_cost,
            "imposed": self.imposed,
            "eviction": d.eviction,
            "cost": self.cost,
        }


def queued_prompts_s(model: StepModel, tokens: int, prompts: int, chunk: int) -> float:
    """Return the seconds of so many queued prompts, all of one length: they share steps, and the
    tokens of each attend only to its own."""
    steps_s = model.prefill_s(0, tokens, chunk) - model.prompt_s(0, tokens)
    return steps_s + prompts * model.prompt_s(0, tokens // max(1, prompts))


def beside_longer_s(queue_s: float, short_s: float, step_s: float) -> float:
    """Return the seconds that a short prompt takes longer because others share its step of
    ``step_s``. ``queue_s``: of all queued prompts, ``short_s`` of which are short, too."""
    return min(max(0.0, queue_s - short_s), BESIDE_STEPS * step_s)


def objective_cost(x: float) -> float:
    """Return h(x) for a predicted latency that is ``x`` times its objective."""
    return x + MISS_WEIGHT * (x - 1) if x > 1 else x


def congestion_cost(awaiting: float, prefill_share: float) -> float:
    """Return the cost of a prompt, which takes a share of the TTFT objective, to those that wait
    for the worker. With more than an objective's work ahead they are late in any case."""
    return min(1.0, awaiting * prefill_share)


def usable_tokens(cached: int, tokens: int) -> int:
    """Return the cached tokens that need no compute: whole blocks, and never the last token."""
    return min(cached, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def source_wait_s(worker: PrefillState, step_s: float = 0.0) -> float:
    """Return the seconds until a worker looks up a prefix that another one fetches: a whole step,
    of prompts if it has any, or else of ``step_s``. Half of one is left on average, but the copies
    that follow run beside the next step, which slows them."""
    if not worker.queue_s:
        return step_s
    return min(worker.queue_s, worker.model.prefill_s(0, worker.chunk, worker.chunk))


def decode_step_s(worker: DecodeState) -> float:
    """Return the seconds of a step of the worker's present batch; 0 where it decodes nothing."""
    return worker.own.model.decode_s(worker.batch, worker.kv_used) if worker.batch else 0.0


def find_fetch(
    worker: PrefillState, best: PrefixSource | None, query: PlacementQuery, net: LinkEstimates
) -> PrefixFetch | None:
    """Return the fetch of the prefix of ``best`` to this worker; None where computing is sooner."""
    if best is None or best.instance == worker.instance:
        return None
    tokens = usable_tokens(best.tokens, query.tokens)
    held = usable_tokens(worker.reusable, query.tokens)
    if tokens <= held:
        return None
    wire_s = (tokens - held) * query.kv_bytes / net.share(best.instance, worker.instance)
    wait_s = PATH_S + best.wait_s
    seconds = wait_s + wire_s
    without = worker.queue_s + worker.model.prefill_s(held, query.tokens - held, worker.chunk)
    rest = worker.model.prefill_s(tokens, query.tokens - tokens, worker.chunk)
    if max(worker.queue_s, seconds) + rest > FETCH_GAIN * without:
        return None
    return PrefixFetch(best.instance, tokens, seconds, wait_s)


def prefill_terms(
    worker: PrefillState,
    best: PrefixSource | None,
    query: PlacementQuery,
    net: LinkEstimates,
    goals: Objectives,
) -> PrefillTerms:
    """Predict the prefill of the request on one worker, with a fetch where that is sooner."""
    fetch = find_fetch(worker, best, query, net)
    cached = fetch.tokens if fetch else usable_tokens(worker.reusable, query.tokens)
    missing = query.tokens - cached
    prefill_s = worker.model.prefill_s(cached, missing, worker.chunk)
    begins = max(worker.queue_s, fetch.seconds) if fetch else worker.queue_s
    tail = (missing - 1) % worker.chunk + 1
    ttft_s = begins + worker.beside_s + prefill_s
    share = prefill_s / goals.ttft_s
    return PrefillTerms(
        *(worker.instance, cached, fetch, worker.queue_s, prefill_s, ttft_s),
        *(worker.correction, tail, worker.busy_s / goals.ttft_s),
        *(DELAY_SHARE * share, worker.is_short, congestion_cost(worker.awaiting, share)),
    )


def decode_terms(
    worker: DecodeState, query: PlacementQuery, goals: Objectives, resident_output: float
) -> DecodeTerms:
    """Predict the decode of the request on one worker; ``resident_output``: mean output tokens."""
    model, cached = worker.own.model, usable_tokens(worker.own.cached, query.tokens)
    need = query.tokens + query.output - cached
    batch = min(worker.batch, worker.rows) if worker.rows else worker.batch
    before = decode_pace(model, worker.speculation, batch, worker.kv_used).tpot_s
    kv_tokens = worker.kv_used + query.tokens + query.output / 2
    step = decode_pace(model, worker.speculation, batch + 1, kv_tokens).tpot_s
    turn_s = resident_output * before  # a resident leaves, on average, every turn_s / batch
    known = worker.kv_total > 0
    short = max(0.0, need - worker.kv_free) if known else 0.0
    # What was promised since the last report is in ``kv_free`` alone, but makes room in its turn.
    # After a burst of requests to an idle worker ``kv_used`` is near 0: the wait would be hours.
    held = worker.kv_total - worker.kv_free
    # Long prompts take what they were promised when they are computed. Until then it lies idle: a
    # short one that takes it now will mostly have ended, and who waits for pages is served by age.
    wait = short / held * turn_s if need > worker.kv_unused and held > 0 else 0.0
    if worker.rows and worker.batch >= worker.rows:
        wait = max(wait, (worker.batch + 1 - worker.rows) * turn_s / worker.rows)
    imposed = batch * (objective_cost(step / goals.tpot_s) - objective_cost(before / goals.tpot_s))
    crowded = need * min(1.0, held / worker.kv_total) if known else 0.0
    eviction = REUSE_SHARE * crowded * model.prompt_token / goals.ttft_s
    busy = worker.batch / worker.rows if worker.rows else worker.batch * step / goals.tpot_s
    return DecodeTerms(
        *(worker.own.instance, cached, query.tokens - cached, batch, busy, step, wait),
        *(imposed, eviction, short == 0),
    )


def step_budget_s(alone_s: float, prompts_s: float, goals: Objectives) -> float:
    """Return the seconds of a decode worker's step with prompts in it, as the worker decides unless
    it is configured otherwise (``decode_step_budget_s`` in engine/scheduling/step_policy.py)."""
    urgency = min(1.0, prompts_s / (URGENT_TTFT_SHARE * goals.ttft_s))
    most_s = LARGEST_BUDGET_SHARE * goals.tpot_s
    budget_s = alone_s + max(alone_s, urgency**2 * (most_s - alone_s))
    return min(budget_s, max(most_s, (1 + LEAST_PROMPT_SHARE) * alone_s))


def local_prefill_terms(
    worker: DecodeState,
    decode: DecodeTerms,
    best: PrefixSource | None,
    query: PlacementQuery,
    net: LinkEstimates,
    goals: Objectives,
    resident_output: float,
) -> tuple[PrefillTerms, float]:
    """Predict the prefill on the decode worker itself, and the cost that its stall adds to the
    residents beside that of decoding. Prompts get what decoding leaves of a step's budget."""
    own = worker.own
    alone = prefill_terms(own, best, query, net, goals)
    if not worker.batch:
        return alone, 0.0
    stall_s = own.model.prompt_s(alone.cached, query.tokens - alone.cached)
    decode_s = decode_step_s(worker)
    most_s = BESIDE_STEPS * LARGEST_BUDGET_SHARE * goals.tpot_s
    begins = alone.ttft_s - alone.prefill_s - own.beside_s + min(own.beside_s, most_s)
    budget_s = step_budget_s(decode_s, stall_s + begins, goals)
    steps = max((query.tokens - alone.cached) / own.chunk, stall_s / max(budget_s - decode_s, 1e-9))
    prefill_s = stall_s + max(1.0, steps) * decode_s
    per_token = decode.step_s + stall_s / max(1.0, resident_output / 2)
    imposed = objective_cost(per_token / goals.tpot_s) - objective_cost(
        decode.step_s / goals.tpot_s
    )
    terms = alone._replace(
        prefill_s=prefill_s,
        ttft_s=max(begins, decode.wait_s) + prefill_s,
        congestion=congestion_cost(own.awaiting, prefill_s / goals.ttft_s),
    )
    return terms, worker.batch * imposed


def remote_placements(
    prefill: Sequence[PrefillTerms],
    d: DecodeTerms,
    query: PlacementQuery,
    net: LinkEstimates,
    goals: Objectives,
) -> list[Placement]:
    """Predict prefill on each of these workers and decode on D. Inlined, as a decision prices
    64."""
    decode, missing, busy, wait_s, imposed = d.instance, d.missing, d.busy, d.wait_s, d.imposed
    step_s, eviction, gaps = d.step_s, d.eviction, query.output - 1
    kv_bytes, ttft_goal_s, tpot_goal_s = query.kv_bytes, goals.ttft_s, goals.tpot_s
    path_s, bandwidth, active = net.path_s.get, net.bandwidth.get, net.active
    found = []
    for p in prefill:
        link = (p.instance, decode)
        ttft_s = path_s(link, PATH_S) + p.correction * p.ttft_s
        share = bandwidth(link, net.default_bandwidth)  # net.share(*link)
        per_token = kv_bytes / (share / (1 + active[link]) if link in active else share)
        wire_s = missing * per_token
        tail_s = (p.tail if p.tail < missing else missing) * per_token
        begins_s = p.queue_s if p.queue_s > wait_s else wait_s  # KV moves
        ready_s = max(ttft_s + tail_s, begins_s + wire_s)
        tpot_s = (ready_s - ttft_s) / gaps + step_s
        ttft_cost, tpot_cost = (
            objective_cost(ttft_s / ttft_goal_s),
            objective_cost(tpot_s / tpot_goal_s),
        )
        others = imposed + p.delay + p.congestion
        cost = ttft_cost + tpot_cost + others + eviction
        values = (
            p.instance, p, d, busy + p.load, ttft_s, wire_s, ready_s, tpot_s, ttft_cost, tpot_cost,
            others, cost,
        )  # fmt: skip
        found.append(tuple.__new__(Placement, values))
    return found


def local_placement(
    p: PrefillTerms, d: DecodeTerms, stall: float, net: LinkEstimates, goals: Objectives
) -> Placement:
    """Predict prefill and decode on D; ``stall``: the cost that the prefill adds to its
    residents."""
    path_s = net.path_s.get((d.instance, d.instance), LOCAL_PATH_S)
    ttft_s = path_s + p.correction * p.ttft_s
    tpot_s = d.step_s
    ttft_cost, tpot_cost = (
        objective_cost(ttft_s / goals.ttft_s),
        objective_cost(tpot_s / goals.tpot_s),
    )
    imposed = d.imposed + stall + p.delay + p.congestion
    cost = ttft_cost + tpot_cost + imposed + d.eviction
    return Placement(
        *(None, p, d, d.busy + p.load, ttft_s, 0.0, ttft_s, tpot_s),
        *(ttft_cost, tpot_cost, imposed, cost),
    )
