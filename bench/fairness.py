"""Two tenants, one of which floods: the other's time to first token, and the shares of both.

    python -m bench.fairness [--seed N] [--simulated]

Two prefill and two decode workers serve prompts that share no prefix. A closed loop measures what
they sustain. Then, in rounds that take turns,

    alone     the quiet tenant sends a tenth of that, evenly spaced
    flooded   the same, while another tenant of equal weight sends ten times as much as is sustained
    shares    both send more than twice their share, with weights 1:1 and 1:3

The quiet tenant's TTFT p99 when flooded should be within 1.25x of that alone, and shares of
weighted tokens (``router/fairness/virtual_counters.py``) within 5% of the weights. Prompts are
several prefill chunks long: the quiet tenant's prompt waits for one chunk of another's.

``--simulated`` runs the product's queue over simulated workers on a virtual clock instead
(``bench/simulator/fair_simulation.py``), also with four routers, and says how goodput and waits
depend on the load and on the number of tenants. It takes half a minute, and its results do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import msgspec

from bench.lib.http_load import Arrival, LoadClient, StreamTiming
from bench.lib.report import ResultRow, finish, percentile
from bench.lib.standalone import Standalone
from bench.simulator.fair_simulation import GOALS, FairSimulation, TenantTraffic
from router.fairness.virtual_counters import service_of
from router.tenants.tenant import Tenant

ROUNDS = 3
SEGMENT_S = 15.0
QUIET = 0.1  # of what is sustained
FLOOD = 10.0
BACKLOG = 2.5  # of what is sustained, for each tenant
STREAMS = 16
PROMPT, OUTPUT = 512, 32
FIRST_ID, VOCAB = 3, 4096
TTFT_SLO_MS = 1000
WORKER = ("--kv-tokens", "32768", "--max-model-len", "4096", "--prefill-chunk", "128")


class RunningTenant(NamedTuple):
    """A tenant of the pool and its key."""

    key: str
    weight: float


class FairTraffic:
    """Sends evenly spaced prompts that share no prefix, as several tenants at once."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._draw = Random(seed)

    def arrivals(self, rate: float, seconds: float) -> list[Arrival]:
        count = round(rate * seconds)
        prompts = [
            [self._draw.randrange(FIRST_ID, VOCAB) for _ in range(PROMPT)] for _ in range(count)
        ]
        return [Arrival(i / rate, prompt, OUTPUT) for i, prompt in enumerate(prompts)]

    async def sustained(self, tenant: RunningTenant, seconds: float) -> float:
        """Return the requests per second that a closed loop sustains."""
        client = self._client(tenant)
        found = await client.closed_loop(self.arrivals(60, seconds), STREAMS, seconds)
        return found.rate

    async def send(
        self, loads: dict[RunningTenant, float]
    ) -> dict[RunningTenant, list[StreamTiming]]:
        """Let each tenant send its requests per second; return all answers."""
        arrivals = {tenant: self.arrivals(rate, SEGMENT_S) for tenant, rate in loads.items()}
        answers = await asyncio.gather(
            *(self._client(tenant).open_loop(planned) for tenant, planned in arrivals.items())
        )
        return dict(zip(arrivals, answers, strict=True))

    def _client(self, tenant: RunningTenant) -> LoadClient:
        return LoadClient(self._url, salt=secrets.token_hex(8), api_key=tenant.key)


def ttft_p99(answers: Sequence[StreamTiming]) -> float:
    return percentile([a.ttft_s for a in answers if a.status == 200], 0.99)


def share_of(answers: dict[RunningTenant, list[StreamTiming]], tenant: RunningTenant) -> float:
    """Return the tenant's share of the weighted tokens whose first token came in the segment."""
    service = {
        t: sum(service_of(a.prompt - a.cached, OUTPUT) for a in sent if a.at + a.ttft_s < SEGMENT_S)
        for t, sent in answers.items()
    }
    return service[tenant] / sum(service.values())


async def measure(url: str, seed: int, tenants: Sequence[RunningTenant]) -> list[ResultRow]:
    quiet, flood, heavy = tenants
    traffic = FairTraffic(url, seed)
    await traffic.sustained(flood, 4.0)  # the router learns
    capacity = await traffic.sustained(flood, 8.0)
    print(f"sustained: {capacity:.1f} requests/s", flush=True)
    alone, flooded, even, weighted = list[float](), list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        alone.append(ttft_p99((await traffic.send({quiet: QUIET * capacity}))[quiet]))
        both = await traffic.send({quiet: QUIET * capacity, flood: FLOOD * capacity})
        flooded.append(ttft_p99(both[quiet]))
        both = await traffic.send({quiet: BACKLOG * capacity, flood: BACKLOG * capacity})
        even.append(share_of(both, quiet))
        both = await traffic.send({heavy: BACKLOG * capacity, flood: BACKLOG * capacity})
        weighted.append(share_of(both, heavy))
        print(
            f"p99 {alone[-1]:.3f} s, flooded {flooded[-1]:.3f} s, shares {even[-1]:.3f}"
            f" {weighted[-1]:.3f}",
            flush=True,
        )
    of_weights = heavy.weight / (heavy.weight + flood.weight)
    ratios = [a / b for a, b in zip(alone, flooded, strict=True)]
    return [
        ResultRow("closed loop", capacity, "requests/s"),
        ResultRow("TTFT p99 alone", 1e3 * median(alone), "ms"),
        ResultRow("TTFT p99 flooded", 1e3 * median(flooded), "ms", "alone", median(ratios)),
        ResultRow("share at weights 1:1", median(even), "", "its weight", median(even) / 0.5),
        ResultRow(
            "share at weights 3:1",
            median(weighted),
            "",
            "its weight",
            median(weighted) / of_weights,
        ),
    ]


async def run(seed: int) -> None:
    tenants = [RunningTenant(f"sk-{secrets.token_hex(16)}", weight) for weight in (1.0, 1.0, 3.0)]
    with tempfile.TemporaryDirectory(prefix="baton-fair-") as folder:
        keys = Path(folder) / "keys.json"
        named = {t.key: {"tenant": f"t{i}", "weight": t.weight} for i, t in enumerate(tenants)}
        keys.touch(mode=0o600)
        keys.write_bytes(msgspec.json.encode(named))
        router = ("--ttft-slo-ms", str(TTFT_SLO_MS), "--api-keys", str(keys))
        pool = Standalone(Path(folder), worker_options=WORKER, router_options=router)
        try:
            await pool.start()
            rows = await measure(pool.url, seed, tenants)
        finally:
            await pool.close()
    finish("fairness", rows)


# ---- on a virtual clock --------------------------------------------------------------------------


def simulated_shares(weight: float, routers: int, seed: int) -> float:
    """Return the share of a tenant of this weight against a flood of weight 1."""
    simulation = FairSimulation(routers, 2 * routers, seed)
    rate = simulation.capacity / PROMPT
    spread = (1.0,) * routers
    traffic = [
        TenantTraffic(Tenant("flood"), 10 * rate, shares=spread),
        TenantTraffic(Tenant("other", weight=weight), BACKLOG * rate, shares=spread),
    ]
    results = simulation.run(traffic, 30.0, warm_up_s=5.0)
    return results["other"].service / sum(r.service for r in results.values())


def simulated_p99(flood: float, seed: int) -> float:
    """Return the TTFT p99 of a quiet tenant beside a flood, in multiples of the capacity."""
    simulation = FairSimulation(seed=seed)
    rate = simulation.capacity / PROMPT
    traffic = [
        TenantTraffic(Tenant("flood"), flood * rate),
        TenantTraffic(Tenant("quiet"), QUIET * rate, even=True),
    ]
    return percentile(simulation.run(traffic, 60.0, warm_up_s=5.0)["quiet"].ttft, 0.99)


def simulated_goodput(load: float, seed: int, tenants: int = 1) -> float:
    """Return the share of the capacity that meets the TTFT objective at this load, which so many
    tenants send in equal parts."""
    simulation = FairSimulation(seed=seed)
    rate = simulation.capacity / PROMPT
    traffic = [TenantTraffic(Tenant(f"t{n}"), load * rate / tenants) for n in range(tenants)]
    found = simulation.run(traffic, 30.0).values()
    return sum(ttft_s <= GOALS.ttft_s for each in found for ttft_s in each.ttft) / 30.0 / rate


def simulate(seed: int) -> list[ResultRow]:
    rows = []
    for routers in (1, 4):
        for weight in (1.0, 3.0):
            due = weight / (1 + weight)
            share = simulated_shares(weight, routers, seed)
            name = f"share at weights {weight:g}:1, {routers} router(s)"
            rows.append(ResultRow(name, share, "", "its weight", share / due))
    alone_s, flooded_s = simulated_p99(0.0, seed), simulated_p99(FLOOD, seed)
    rows.append(ResultRow("TTFT p99 alone", 1e3 * alone_s, "ms"))
    rows.append(ResultRow("TTFT p99 flooded", 1e3 * flooded_s, "ms", "alone", alone_s / flooded_s))
    good = {load: simulated_goodput(load, seed) for load in (0.9, 1.0, 3.0, 10.0)}
    for load, found in good.items():
        name = f"goodput at {load:g} times the capacity"
        rows.append(ResultRow(name, found, "of it", "the best", found / max(good.values())))
    for tenants in (10, 100, 1000):
        found = simulated_goodput(3.0, seed, tenants)
        name = f"goodput at 3 times the capacity, {tenants} tenants"
        rows.append(ResultRow(name, found, "of it", "one tenant", found / good[3.0]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if options.simulated:
        finish("fairness, simulated", simulate(options.seed))
    else:
        asyncio.run(run(options.seed))


if __name__ == "__main__":
    main()
