"""What it gains to reserve a decode worker's pages late, on fixed pools in the simulator.

    python -m bench.simulator.reservation --traces FOLDER [--splits 14+3,14+5]

The traffic is one copy of Mooncake's conversation trace, a quarter of what
``bench.pools`` plays. Each split of workers is simulated twice: with pages that are
reserved when KV is about to flow, as the product does (protocol/page_reservation.py), and when the
prefill starts. The figure is the share of the requests that meet both objectives.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

from bench.lib.report import ResultRow, finish
from bench.simulator.split_search import PoolSplit, parse_splits
from bench.simulator.studies import mooncake
from cluster.simulator.devices.transfer import KvCarrier
from cluster.simulator.result import meets_objectives
from cluster.simulator.scenario import parse_scenario
from cluster.simulator.simulation import simulate

SPLITS = "14+2,14+3,14+4,14+5"
ONE_COPY_GPUS = 15.0


def attained(traces: Path, split: PoolSplit) -> float:
    """Return the share of requests that meet both objectives."""
    pools = {"prefill": split.prefill, "decode": split.decode}
    study = mooncake(traces, ONE_COPY_GPUS)
    scenario = parse_scenario({**study.scenario, "name": str(split), "pools": pools})
    requests = simulate(scenario).requests
    return sum(all(meets_objectives(r, scenario.goals)) for r in requests) / len(requests)


def rows(traces: Path, split: PoolSplit) -> list[ResultRow]:
    """Return the shares of one split with pages that are reserved late, and at the start."""
    with mock.patch.object(KvCarrier, "reservation_delay_s", lambda carrier, request: 0.0):
        early = attained(traces, split)
    late = attained(traces, split)
    name = f"{split}, pages reserved"
    return [
        ResultRow(f"{name} at the start", 100 * early, "%"),
        ResultRow(f"{name} late", 100 * late, "%", "at the start", late / early),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--splits", type=parse_splits, default=SPLITS, help="P+D,P+D,...")
    args = parser.parse_args()
    finish("reservation", [row for split in args.splits for row in rows(args.traces, split)])


if __name__ == "__main__":
    main()
