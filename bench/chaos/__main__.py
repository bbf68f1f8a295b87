"""The command line of the soak, and its table.

    python -m bench.chaos [--minutes N] [--seed N]

Exits with 1 if any text was wrong, any stream was lost, or anything leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.chaos.cut_links import LinkCutter, enter_namespace
from bench.chaos.leaks import ProcessHistory
from bench.chaos.soak import SoakResult, soak
from bench.lib.report import ResultRow, finish, percentile


def rows(result: SoakResult) -> list[ResultRow]:
    found = [
        ResultRow("rounds", result.rounds, ""),
        ResultRow("streams", result.streams, ""),
        ResultRow("wrong texts", result.wrong, ""),
        ResultRow("lost streams", result.lost, ""),
        ResultRow("refused streams (429 or 503)", result.refused, ""),
        ResultRow("all faults", len(result.faults), ""),
    ]
    for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "longest")):
        wait = percentile(result.waits or [0.0], share)
        found.append(ResultRow(f"longest wait of a stream, {name}", wait, "s"))
    huge = result.side.huge_s
    if huge:
        found.append(ResultRow("prompt of 8 MiB refused, p50", percentile(huge, 0.5), "s"))
        found.append(ResultRow("prompt of 8 MiB refused, longest", max(huge), "s"))
    found += [ResultRow(kind, n, "times") for kind, n in sorted(Counter(result.done).items())]
    found += [ResultRow(got, n, "") for got, n in sorted(result.side.answers.items())]
    return found + [row for history in result.histories for row in _sizes(history)]


def _sizes(history: ProcessHistory) -> list[ResultRow]:
    """Return first and last sizes of a process that was there for several moments of rest."""
    if len(history.sizes) < 2:
        return []
    first, last = history.sizes[0], history.sizes[-1]
    return [
        ResultRow(f"{history.name}: resident", last.rss_mib, "MiB", f"{first.rss_mib:.0f} MiB"),
        ResultRow(f"{history.name}: descriptors", last.fds, "", f"{first.fds}"),
        ResultRow(f"{history.name}: threads", last.threads, "", f"{first.threads}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    why_not = enter_namespace("bench.chaos", sys.argv[1:])
    if why_not:
        print(f"no links are cut, because {why_not}", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        cutter = None if why_not else LinkCutter()
        result = asyncio.run(soak(options.minutes, options.seed, Path(folder), cutter))
    finish("chaos", rows(result))
    for fault in result.faults:
        print(fault)
    raise SystemExit(bool(result.faults))


if __name__ == "__main__":
    main()
