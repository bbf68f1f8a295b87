"""The whole stack beside the bare engine: the cost of two pools, KV transfer and HTTP.

    python -m bench.stack [--quick]

For the demo model and a random one of 100 M parameters, at 1, 8 and 16 streams of 256-token prompts
and 64 output tokens. Stack and engine take turns, round by round, and medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from bench.lib.bare_engine import (
    ClosedLoopWorkload,
    ServingOutcome,
    TokenTiming,
    bare_engine,
    run_bare,
    summarize,
)
from bench.lib.engines import SHAPE_100M, make
from bench.lib.http_load import Arrival, LoadClient
from bench.lib.local_cluster import LocalCluster, local_cluster
from bench.lib.report import ResultRow, finish, median
from cluster.models.locate import demo_path

STREAMS = (1, 8, 16)
VOCAB = 4096
PROMPT, OUTPUT = 256, 64


def workload(streams: int, requests_each: int, seed: int) -> ClosedLoopWorkload:
    return ClosedLoopWorkload(streams, streams * requests_each, PROMPT, OUTPUT, VOCAB, seed)


async def run_load(client: LoadClient, load: ClosedLoopWorkload) -> ServingOutcome:
    """Send the workload over HTTP. Raises RuntimeError for a request that is not answered."""
    arrivals = [Arrival(0.0, prompt, load.output_tokens) for prompt in load.prompts()]
    found = await client.closed_loop(arrivals, load.streams)
    if failed := [a for a in found.answers if a.status != 200]:
        raise RuntimeError(
            f"{len(failed)} of {len(arrivals)} requests were not answered in full; the first of"
            f" them has status {failed[0].status} after {failed[0].ended_s:.1f} s"
        )
    timings = [
        TokenTiming(a.ttft_s, a.ttft_s + sum(a.gaps), load.output_tokens) for a in found.answers
    ]
    return summarize(timings, found.seconds)


def measure(
    cluster: LocalCluster, model: Path, rounds: int, requests_each: int
) -> dict[int, tuple[list[ServingOutcome], list[ServingOutcome]]]:
    """Return the (bare, stack) outcomes of each number of streams."""
    engine, client = bare_engine(model), LoadClient(cluster.url, cluster.state.model_id)
    results: dict[int, tuple[list[ServingOutcome], list[ServingOutcome]]] = {
        n: ([], []) for n in STREAMS
    }
    asyncio.run(run_load(client, workload(2, 2, 999)))  # warm-up
    run_bare(engine, workload(2, 2, 998))
    seed = 0
    for _ in range(rounds):
        for streams in STREAMS:
            seed += 1
            each = requests_each * 4 if streams == 1 else requests_each
            load = workload(streams, each, seed)
            results[streams][0].append(run_bare(engine, load))
            results[streams][1].append(asyncio.run(run_load(client, load)))
    return results


def rows(
    label: str, streams: int, bare: list[ServingOutcome], stack: list[ServingOutcome]
) -> list[ResultRow]:
    def middle(outcomes: list[ServingOutcome], field: str) -> float:
        return median([getattr(o, field) for o in outcomes])

    at = f"{label}, {streams} streams"
    ttft, bare_ttft = middle(stack, "ttft_ms"), middle(bare, "ttft_ms")
    tpot, bare_tpot = middle(stack, "tpot_ms"), middle(bare, "tpot_ms")
    rate, bare_rate = middle(stack, "tokens_per_s"), middle(bare, "tokens_per_s")
    return [
        ResultRow(f"{at}: TTFT", ttft, "ms", f"engine {bare_ttft:.1f} ms", bare_ttft / ttft),
        ResultRow(f"{at}: TTFT added", ttft - bare_ttft, "ms"),
        ResultRow(f"{at}: TPOT", tpot, "ms", f"engine {bare_tpot:.2f} ms", bare_tpot / tpot),
        ResultRow(
            f"{at}: tokens", rate, "tok/s", f"engine {bare_rate:.0f} tok/s", rate / bare_rate
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, demo model only")
    quick = parser.parse_args().quick
    found: list[ResultRow] = []
    with tempfile.TemporaryDirectory() as folder:
        models = [("demo", demo_path(), 3)]
        if not quick:
            models.append(("100M", make(Path(folder) / "random-100m", SHAPE_100M), 1))
        for label, path, requests_each in models:
            with local_cluster("--model", str(path), "--threads", "1") as cluster:
                results = measure(cluster, path, 1 if quick else 3, requests_each)
                for streams, (bare, stack) in results.items():
                    found += rows(label, streams, bare, stack)
                resident = cluster.resident_bytes() / 2**30
                found.append(ResultRow(f"{label}: resident memory, all processes", resident, "GiB"))
    finish("stack", found)


if __name__ == "__main__":
    main()
