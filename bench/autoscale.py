"""Pools that follow the mix, against fixed splits and Ray Serve's policy, on paced devices.

    python -m bench.autoscale [--quick] [--brief] [--all-splits] [--share X] [--churn N] [--seed N]
        [--keep FOLDER]

A real local cluster (`baton up`, Ray Serve, the product's loop of scaling) whose engines are paced
(``bench/paced.py``): each computes the demo model in truth, and takes the time of a declared
device. The same arrivals go to every contestant, one after the other: Baton's policy with loans;
Ray Serve's policy of ongoing requests, fed with running + waiting of each pool, at two settings;
and the fixed splits of as many workers as Baton had on average that do best in the simulator
(``--all-splits``: all of them; ``--brief``: the best one, and one setting of Ray's). All scaling
goes the same way; what takes minutes outside is made quicker for all alike (`QUICKER`), since
phases are so short.

Attained: share of all requests within the objective; one refused or failed meets none. Goodput per
worker-second: requests that met both, over the seconds of workers from the asking until they are
gone. Late: steps of the paced engines that took over 5% longer than declared: with many of them the
machine was too small for the figures to mean anything.

``--churn N``: instead, N loans and scale-downs under load (``bench/autoscale_churn.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.autoscale_churn import churn
from bench.autoscale_contest import Contestant, Run, contest
from bench.autoscale_figures import figures
from bench.autoscale_phases import IDLE, MOVING, Phase, arrivals, shortened
from bench.autoscale_rows import rows, whole
from bench.autoscale_screen import best, met
from bench.open_loop import Objective, open_loop
from bench.paced_cluster import DEVICE, PacedCluster, paced_cluster
from bench.report import Row, finish
from cluster.autoscale.settings import AutoscalerSettings

GOAL = Objective(2.0, 0.1)
QUICKER = 10.0
"""Delays and windows of both policies are a tenth of their defaults: so is a cold start here (9 s)
of what it is where weights are large."""

ROUTER = ("--ttft-slo-ms", f"{1e3 * GOAL.ttft_s:g}", "--tpot-slo-ms", f"{1e3 * GOAL.tpot_s:g}")
RAY = ((1.5, 8.0), (2.5, 11.0))
"""Ongoing requests of a prefill and of a decode worker: tight and loose around what objectives
allow (a prompt computed and one waiting; b* = 11)."""

QUICK = (
    Phase("prompt-heavy", 18.0, 3.4, 600, 12),
    Phase("answer-heavy", 24.0, 3.3, 64, 60),
)
"""Four workers, and loans alone; fixed splits are only simulated. It shows that all works, and is
too short for figures."""

SCREENED = 2
"""Fixed splits that are measured, of those that the simulator has tried."""


def settings(cluster: PacedCluster, most: int, gpus: float) -> AutoscalerSettings:
    """The product's defaults, ``QUICKER``; it looks each second."""
    plain = AutoscalerSettings(cluster="default", redis_url="", token="")
    return AutoscalerSettings(
        cluster="default",
        redis_url=cluster.redis_url,
        token=cluster.token,
        ttft_slo_s=GOAL.ttft_s,
        tpot_slo_s=GOAL.tpot_s,
        mode="act",
        interval_s=1.0,
        window_s=plain.window_s / QUICKER,
        prefill_max=most,
        decode_max=most,
        gpus=gpus,
        loan_drain_s=plain.loan_drain_s,
        down_after_s=plain.down_after_s / QUICKER,
        down_every_s=plain.down_every_s / QUICKER,
        warm_up_s=plain.warm_up_s / QUICKER,
        start_s=plain.start_s / QUICKER,
    )


async def quick(cluster: PacedCluster, seed: int) -> list[Row]:
    load = arrivals(QUICK, seed)
    told = settings(cluster, 3, 4)
    baton = await contest(cluster, Contestant("Baton", "baton", (2, 2)), told, load, QUICKER)
    simulated = [
        Row(f"{p} + {d}, simulated: both objectives", met((p, d), load, GOAL), "of requests")
        for p, d in ((1, 3), (2, 2), (3, 1))
    ]
    return [*rows(baton, [], [], QUICK, GOAL), *simulated]


async def full(cluster: PacedCluster, options: argparse.Namespace) -> list[Row]:
    phases, keep = shortened(MOVING, options.share), options.keep
    load = arrivals(phases, options.seed)
    told = settings(cluster, 6, 8)

    async def run(contestant: Contestant) -> Run:
        done = await contest(cluster, contestant, told, load, QUICKER)
        found = figures(done.answers, done.looks, whole(phases), GOAL)
        print(f"{contestant.name}: {found}, late {done.late.late_share:.1%}", flush=True)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            name = contestant.name.replace(" ", "").replace("/", "-")
            shutil.copy(done.log, keep / f"{name}.jsonl")
        return done

    baton = await run(Contestant("Baton", "baton", (1, 1)))
    others = RAY[-1:] if options.brief else RAY
    ray = [
        await run(Contestant(f"Ray Serve {p:g}/{d:g}", "ray", (1, 1), (p, d))) for p, d in others
    ]
    size = max(2, round(figures(baton.answers, baton.looks, whole(phases), GOAL).mean_workers))
    measured = size if options.all_splits else 1 if options.brief else SCREENED
    splits = best(size, measured, load, GOAL)
    fixed = [await run(Contestant(f"{p} + {d}", "hold", (p, d))) for p, d in splits]
    return rows(baton, ray, fixed, phases, GOAL)


async def warm(cluster: PacedCluster) -> None:
    """The router learns how fast the workers are."""
    await open_loop(cluster.url, arrivals([IDLE._replace(seconds=4.0, rate=2.0)], 0), "warm")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short phases, Baton alone")
    parser.add_argument("--brief", action="store_true", help="one rival of each kind")
    parser.add_argument("--all-splits", action="store_true", help="measure every fixed split")
    parser.add_argument("--churn", type=int, metavar="N", help="loans and scale-downs under load")
    parser.add_argument("--share", type=float, default=1.0, help="of the phases' length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder that takes the logs of decisions")
    options = parser.parse_args(words)
    if options.churn is not None:
        finish("autoscale_churn", churn(options.churn, options.seed))
        return
    start = 2 if options.quick else 1
    pools = ("--prefill", str(start), "--decode", str(start))
    with paced_cluster(DEVICE, *pools, *ROUTER) as cluster:
        found = asyncio.run(_measure(cluster, options))
    finish("autoscale", found)


async def _measure(cluster: PacedCluster, options: argparse.Namespace) -> list[Row]:
    await warm(cluster)
    if options.quick:
        return await quick(cluster, options.seed)
    return await full(cluster, options)


if __name__ == "__main__":
    main()
