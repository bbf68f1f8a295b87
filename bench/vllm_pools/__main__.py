"""Baton's two pools beside vLLM's own split of prefill and decode, in turns on one machine.

    python -m bench.vllm_pools --vllm PROGRAM [--quick]

``PROGRAM`` is the command ``vllm`` of an environment that has vLLM's CPU build and NIXL. Both serve
the same model in fp32 with one prefill and one decode worker of one compute thread each, over HTTP,
for 1, 8 and 16 streams of 256-token prompts that share no prefix, and 64 output tokens, greedy.
Baton runs without speculation, because vLLM does not speculate unless it is asked to; all else is
as both come. They take turns, round by round, and medians are compared. Each is alone: vLLM's
processes are stopped (SIGSTOP) in Baton's turns, and Baton's cluster ends before vLLM's turns.
``--quick`` runs one round of the demo model; otherwise there are three, and a random model of 100 M
parameters is measured as well.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from bench.lib.bare_engine import ServingOutcome
from bench.lib.engines import SHAPE_100M, make
from bench.lib.http_load import LoadClient
from bench.lib.local_cluster import local_cluster
from bench.lib.report import ResultRow, finish, median
from bench.stack import STREAMS, run_load, workload
from bench.vllm_pools.servers import MODEL_NAME, vllm_pools
from cluster.models.locate import demo_path

WARM_UP = (4, 2)
"""Streams, and requests of each, before the first round."""

TIMEOUT_S = 300.0
Rounds: TypeAlias = tuple[list[list[ServingOutcome]], list[list[ServingOutcome]]]
"""The turns of Baton and of vLLM, each with an outcome for each number of streams."""


def run_turn(client: LoadClient, requests_each: int, seed: int) -> list[ServingOutcome]:
    """Return the outcome for each number of streams. Contestants get the same prompts."""
    asyncio.run(run_load(client, workload(*WARM_UP, 990 + seed)))
    found = []
    for streams in STREAMS:
        each = requests_each * 4 if streams == 1 else requests_each
        load = workload(streams, each, 10 * seed + streams)
        found.append(asyncio.run(run_load(client, load)))
    return found


def measure(
    label: str, vllm: Path, model: Path, folder: Path, rounds: int, requests_each: int
) -> Rounds:
    """Return the turns of Baton and those of vLLM."""
    options = ("--model", str(model), "--threads", "1", "--speculation", "off")
    turns: Rounds = ([], [])
    with vllm_pools(vllm, model, folder) as pools:
        for seed in range(rounds):
            client = LoadClient(pools.url, MODEL_NAME, timeout_s=TIMEOUT_S)
            turns[1].append(run_turn(client, requests_each, seed))
            pools.pause()
            with local_cluster(*options) as cluster:
                client = LoadClient(cluster.url, cluster.state.model_id, timeout_s=TIMEOUT_S)
                turns[0].append(run_turn(client, requests_each, seed))
            pools.resume()
            for name, of in zip(("Baton", "vLLM"), turns, strict=True):
                print(label, name, *of[-1], file=sys.stderr, flush=True)
    return turns


def rows(label: str, turns: Rounds) -> Iterator[ResultRow]:
    for number, streams in enumerate(STREAMS):
        at = f"{label}, {streams} streams"
        baton, vllm = ([turn[number] for turn in of] for of in turns)
        ttft = [median([o.ttft_ms for o in of]) for of in (baton, vllm)]
        tpot = [median([o.tpot_ms for o in of]) for of in (baton, vllm)]
        rate = [median([o.tokens_per_s for o in of]) for of in (baton, vllm)]
        yield ResultRow(f"{at}: TTFT", ttft[0], "ms", f"vLLM {ttft[1]:.1f} ms", ttft[1] / ttft[0])
        yield ResultRow(f"{at}: TPOT", tpot[0], "ms", f"vLLM {tpot[1]:.2f} ms", tpot[1] / tpot[0])
        yield ResultRow(f"{at}: tokens", rate[0], "tok/s", f"vLLM {rate[1]:.0f}", rate[0] / rate[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, required=True, help="the command vllm")
    parser.add_argument("--quick", action="store_true", help="one round, demo model only")
    args = parser.parse_args()
    found: list[ResultRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [("demo", demo_path(), 3)]
        if not args.quick:
            models.append(("100M", make(folder / "random-100m", SHAPE_100M), 1))
        for label, path, requests_each in models:
            rounds = 1 if args.quick else 3
            found += rows(label, measure(label, args.vllm, path, folder, rounds, requests_each))
    finish("vllm_pools", found)


if __name__ == "__main__":
    main()
