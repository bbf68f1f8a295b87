"""Long prompts beside short chats: one prefill and one decode worker against two unsplit workers.

    python -m bench.interference [--quick] [--model demo|100M] [--part split|budgets] [--seed N]

Requests arrive as a Poisson process: chats of 128 tokens, and every fourth request a prompt of
1,500; each has 64 output tokens. The "split" pool has one prefill and one decode worker, routed as
the product does by default. The "unsplit" pool has two workers that do both, with chunked prefill:
the chunk size is swept first, at 70% of what the workers sustain in a closed loop, and the best one
(by goodput, then by ITL p99) is used. Both pools stand on one machine and serve the same requests
in turns.

The part "budgets" compares the step budget that a decode worker finds by itself with fixed ones, on
one prefill and one decode worker and chats of 256 tokens: with 12 streams under way all the time,
then with arrivals at shares of what these 12 sustain.

All have the same objectives: four times the TTFT of a long prompt and four times the TPOT of a
short chat on idle unsplit workers. Goodput is requests per second that meet both objectives, over
the load's own duration. ITL is the gap between two chunks of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.interference.splitting import BY_TIME, CHUNKS, choose_chunk, compare
from bench.interference.step_budgets import compare_budgets
from bench.interference.traffic import InterferenceBenchmark, InterferencePlan, PromptMix, Subject
from bench.lib.engines import SHAPE_100M, make
from bench.lib.report import ResultRow, finish
from cluster.models.locate import demo_path

PARTS = ("split", "budgets")


async def run(
    models: Sequence[str], parts: Sequence[str], plans: dict[str, InterferencePlan]
) -> list[ResultRow]:
    rows: list[ResultRow] = []
    with tempfile.TemporaryDirectory(prefix="baton-mix-") as folder:
        for label in models:
            path = demo_path() if label == "demo" else make(Path(folder) / "r100m", SHAPE_100M)
            bench = InterferenceBenchmark(Subject(label, path, PromptMix()), plans[label])
            if "split" in parts:
                chosen = await choose_chunk(bench)
                rows += chosen.rows + await compare(bench, chosen)
            if "budgets" in parts:
                rows += await compare_budgets(bench)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, demo model only")
    parser.add_argument("--model", choices=("demo", "100M"), action="append")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    models = o.model or (["demo"] if o.quick else ["demo", "100M"])
    if o.quick:
        quick = InterferencePlan((128, BY_TIME), (0.5,), (), 1, 40, o.seed)
        plans = dict.fromkeys(("demo", "100M"), quick)
    else:
        plans = {
            "demo": InterferencePlan(
                (*CHUNKS, BY_TIME), (0.3, 0.6, 0.9), (512, 3000), 2, 60, o.seed
            ),
            "100M": InterferencePlan((64, 256, BY_TIME), (0.4, 0.8), (), 1, 30, o.seed),
        }
    finish("interference", asyncio.run(run(models, o.part or PARTS, plans)))


if __name__ == "__main__":
    main()
