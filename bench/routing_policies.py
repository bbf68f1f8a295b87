"""Routing policies on Mooncake's conversation trace: two prefill and two decode workers.

    python -m bench.routing_policies --trace conversation_trace.jsonl [--quick] [--seed N]
        [--rounds 4] [--routers 8] [--paced]

The trace (kvcache-ai/Mooncake, ``FAST25-release/traces/conversation_trace.jsonl``, Apache-2.0) is
scaled to the demo model: all lengths to a sixteenth, and each prefix block of 512 tokens becomes
one KV block of 32 tokens. Equal ids become equal tokens, so that requests share the same prefixes
as in the trace. Requests longer than the model's context are cut (2% of them).

One router per policy serves the same workers. ``--routers`` compares so many routers of the cost
policy, to which requests go in turn, with one of them instead, at 50% and 75%. A closed loop
measures what the machine sustains, as the mean of the policies; then requests come at their times
in the trace, at 50% and 90% of that. In a segment each policy in turn serves the same requests with
a cache salt of its own; the first quarter of the segment warms the cache and is not counted.
Figures are medians over the rounds, and every round draws other conversations; ratios of hit rates
and of goodputs are of their means, because all serve the same conversations. Goodput is requests
per second that meet both objectives, and the hit rate is cached over prompt tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from bench.lib.http_load import Arrival, LoadClient, Objective, StreamTiming
from bench.lib.paced import Device, lateness
from bench.lib.paced_cluster import ENGINE
from bench.lib.report import ResultRow, finish, percentile
from bench.lib.routing_policies import POLICIES as POLICY_FUNCTIONS
from bench.lib.standalone import Standalone
from cluster.workloads.traces import BLOCK_TOKENS as TRACE_BLOCK
from cluster.workloads.traces import TraceRequest, read_trace
from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import StepModel

SCALE = TRACE_BLOCK // BLOCK_TOKENS
CONTEXT = 4096
FIRST_ID, VOCAB = 3, 4096
LEAST_OUTPUT = 4
"""A time per output token needs at least some tokens."""

COST = "cost"
LOADS = (0.5, 0.9)
ROUTER_LOADS = (0.5, 0.75)
"""Eight router processes take a part of the cores that the workers compute with."""
GOAL = Objective(1.0, 0.05)
"""About ten times the latencies of the median request on idle workers, two cores of 2.6 GHz."""
DEVICE = StepModel(0.03, 2e-3, 2e-6, 5e-4, 5e-8)
"""A paced engine: its steps take about four times as long as on an idle core of 2.6 GHz."""
PACED_GOAL = Objective(2.0, 0.1)
STREAMS = 16
WARM = 0.25
WORKER = ("--kv-tokens", "32768", "--max-model-len", "4096")
PACED_WORKER = (
    *("--worker-engine", ENGINE, "--speculation", "off"),
    *("--peak-tflops", "0.05", "--peak-gb-per-s", "10"),  # nothing to measure at each start
)


def sample(trace: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """Draw whole conversations at random, ``count`` requests in all, in the order of time.

    A conversation keeps all its requests, so that each turn has its predecessor as in the trace.
    """
    conversations: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in trace:
        # All requests share the first block; the second one identifies the conversation.
        conversations[request.blocks[min(1, len(request.blocks) - 1)]].append(request)
    drawn = list(conversations.values())
    random.Random(seed).shuffle(drawn)
    chosen: list[TraceRequest] = []
    for conversation in drawn:
        if len(chosen) + len(conversation) <= count:
            chosen += conversation
    return sorted(chosen, key=lambda r: r.at)


def block_token_ids(number: int) -> list[int]:
    """Return the token ids that stand for one block of the trace."""
    draw = random.Random(number)
    return [draw.randrange(FIRST_ID, VOCAB) for _ in range(BLOCK_TOKENS)]


def scaled(requests: Sequence[TraceRequest], seconds: float) -> list[Arrival]:
    """Scale the requests to ``seconds`` in all, with the same relative distances in time."""
    first = requests[0].at
    span = max(1e-3, requests[-1].at - first)
    arrivals = []
    for request in requests:
        output = max(LEAST_OUTPUT, request.output // SCALE)
        length = max(2, min(CONTEXT - output, request.prompt // SCALE))
        prompt = [token for number in request.blocks for token in block_token_ids(number)][:length]
        arrivals.append(Arrival(seconds * (request.at - first) / span, prompt, output))
    return arrivals


class PolicyPlan(NamedTuple):
    """How much to measure."""

    rounds: int
    segment_s: float
    calibration_s: float
    seed: int
    loads: Sequence[float]
    goal: Objective


class PolicySegment(NamedTuple):
    """Results of one policy on the requests of one round, without those of the warm-up."""

    ttft_p50_s: float
    ttft_p90_s: float
    hit_rate: float
    goodput: float
    failed: float  # share
    error: float  # median of |observed - predicted| / observed TTFT
    ratio: float  # median of observed / predicted


def summary(answers: Sequence[StreamTiming], plan: PolicyPlan) -> PolicySegment:
    """Summarize one segment; a request that failed or was refused has an infinite TTFT."""
    seconds = plan.segment_s
    counted = [a for a in answers if a.at >= WARM * seconds]
    ok = [a for a in counted if a.status == 200]
    ttft = [a.ttft_s for a in counted]
    return PolicySegment(
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        sum(a.cached for a in ok) / max(1, sum(a.prompt for a in ok)),
        sum(a.meets(plan.goal) for a in counted) / ((1 - WARM) * seconds),
        1 - len(ok) / len(counted),
        median(abs(a.observed_s - a.predicted_s) / a.observed_s for a in ok),
        median(a.observed_s / a.predicted_s for a in ok),
    )


def client(urls: Sequence[str]) -> LoadClient:
    """Make a client that finds nothing in the caches of an earlier segment."""
    return LoadClient(urls, salt=secrets.token_hex(8), explain=True)


Urls = Mapping[str, Sequence[str]]  # of the routers of each contestant, the cost policy first
Results = dict[tuple[float, str], list[PolicySegment]]


async def calibrate(urls: Urls, trace: Sequence[TraceRequest], plan: PolicyPlan) -> float:
    """Return the requests per second of a closed loop, after which every router has had traffic."""
    requests = scaled(sample(trace, 400, plan.seed), 1.0)
    rates = []
    for name in urls:
        found = await client(urls[name]).closed_loop(requests, STREAMS, plan.calibration_s)
        rates.append(found.rate)
        print(f"closed loop, {name}: {found.rate:.1f} requests/s", flush=True)
    return mean(rates)


async def measure(
    urls: Urls, trace: Sequence[TraceRequest], plan: PolicyPlan
) -> tuple[float, Results]:
    results: Results = defaultdict(list)
    capacity = await calibrate(urls, trace, plan)
    for turn in range(plan.rounds):
        for load in plan.loads:
            count = max(8, round(load * capacity * plan.segment_s))
            requests = sample(trace, count, plan.seed + 1 + turn)
            arrivals = scaled(requests, plan.segment_s)
            names, shift = list(urls), turn % len(urls)
            for name in names[shift:] + names[:shift]:
                answers = await client(urls[name]).open_loop(arrivals)
                segment = summary(answers, plan)
                results[load, name].append(segment)
                print(f"{load:.0%} {name}: {_line(segment)}", flush=True)
    return capacity, results


def _line(s: PolicySegment) -> str:
    return (
        f"TTFT {s.ttft_p50_s:.3f} / {s.ttft_p90_s:.3f} s, hits {s.hit_rate:.0%},"
        f" goodput {s.goodput:.1f}/s, failed {s.failed:.0%}, prediction off by {s.error:.0%}"
        f" (x{s.ratio:.2f})"
    )


def combined(
    segments: Sequence[PolicySegment], by: Callable[[Iterable[float]], float]
) -> PolicySegment:
    return PolicySegment(*(by(values) for values in zip(*segments, strict=True)))


def rows(capacity: float, results: Results, than: str) -> list[ResultRow]:
    """``than``: the contestant with which the others are compared."""
    found = [ResultRow("closed loop", capacity, "requests/s")]
    for load in sorted({at for at, _ in results}):
        of = {name: combined(results[at, name], median) for at, name in results if at == load}
        means = {name: combined(results[load, name], mean) for name in of}
        base, mean_base = of[than], means[than]
        for name, s in of.items():
            at, own = f"{load:.0%}, {name}", means[name]
            hits, good = _over(own[2], mean_base[2]), _over(own[3], mean_base[3])
            found += [
                ResultRow(f"{at}: TTFT p50", 1e3 * s.ttft_p50_s, "ms", than, base[0] / s[0]),
                ResultRow(f"{at}: TTFT p90", 1e3 * s.ttft_p90_s, "ms", than, base[1] / s[1]),
                ResultRow(f"{at}: hit rate", s.hit_rate, "", than, hits),
                ResultRow(f"{at}: goodput", s.goodput, "requests/s", than, good),
            ]
        cost = of[COST]
        found += [
            ResultRow(f"{load:.0%}, cost: prediction off by", cost.error, "of observed TTFT"),
            ResultRow(f"{load:.0%}, cost: observed / predicted", cost.ratio, ""),
        ]
    return found


def _over(value: float, base: float) -> float | None:
    return value / base if base else None


def policy_pool(
    folder: Path, plan: PolicyPlan, policies: Sequence[str], *, paced: bool
) -> Standalone:
    """Make the workers, and a router for each of ``policies``."""
    ttft_ms, tpot_ms = (f"{1e3 * seconds:g}" for seconds in plan.goal)
    goal = ("--ttft-slo-ms", ttft_ms, "--tpot-slo-ms", tpot_ms)
    return Standalone(
        folder,
        worker_options=(*WORKER, *PACED_WORKER) if paced else WORKER,
        each_router=[("--routing-policy", name, *goal) for name in policies],
        environment=Device(DEVICE[:5], str(folder)).environment() if paced else {},
    )


async def run(
    trace: Sequence[TraceRequest], plan: PolicyPlan, routers: int, *, paced: bool
) -> None:
    policies, than = [COST] * (1 + routers), COST
    if routers == 1:
        policies, than = list(POLICY_FUNCTIONS), "round-robin"
    with tempfile.TemporaryDirectory(prefix="baton-policies-") as folder:
        pool = policy_pool(Path(folder), plan, policies, paced=paced)
        try:
            await pool.start()
            urls: Urls
            if routers > 1:
                urls = {COST: pool.urls[:1], f"{routers} routers": pool.urls[1:]}
            else:
                urls = {name: [url] for name, url in zip(policies, pool.urls, strict=True)}
            capacity, results = await measure(urls, trace, plan)
        finally:
            await pool.close()
        found = rows(capacity, results, than)
        if paced:
            late = lateness(Path(folder))
            found.append(ResultRow("steps late", late.late_share, "of steps"))
    finish("routing_policies", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--paced", action="store_true", help="engines as fast as declared devices")
    options = parser.parse_args()
    loads = LOADS if options.routers == 1 else ROUTER_LOADS
    goal = PACED_GOAL if options.paced else GOAL
    quick = PolicyPlan(1, 6.0, 3.0, options.seed, loads, goal)
    full = PolicyPlan(options.rounds, 12.0, 8.0, options.seed, loads, goal)
    plan = quick if options.quick else full
    asyncio.run(run(read_trace(options.trace), plan, options.routers, paced=options.paced))


if __name__ == "__main__":
    main()
