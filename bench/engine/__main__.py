"""The engine beside transformers and beside the limits of the machine.

    python -m bench.engine [--quick]

One compute thread, fp32, exact KV, greedy; 1, 8 and 32 prompts of 128 random tokens that come at
once, 64 new tokens each; the demo model and a random one of 100 M parameters. The peers
are transformers' ``generate`` (SDPA) and ``generate_batch`` (continuous batching) with the same
prompts. Each contestant has a process of its own on the same core; they take turns, and so do the
measurements of the machine, and medians are compared. ``--quick`` runs one round of the demo model.

``decode`` is the rate while all sequences decode, and ``whole`` is output tokens over the whole
time, prompts included. Floors are the bytes (weights and KV read once per step) over the bandwidth
of a tensor of the weights' size, and the operations over the rate of a large product.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.engine.contestants import (
    ENGINE,
    KINDS,
    PEERS,
    ContestantJob,
    ContestantProcess,
    ContestantRun,
)
from bench.lib.engines import SHAPE_100M, make
from bench.lib.report import ResultRow, finish, median
from bench.lib.roofline import CPU, MachineLimits, ModelCost, measure, quiet_core
from cluster.models.locate import demo_path
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config

BATCHES = (1, 8, 32)
PROMPT, NEW = 128, 64
GEMM = 1536


@dataclass
class EngineResults:
    """All rounds of one model at one batch size."""

    runs: dict[str, list[ContestantRun]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    machines: list[MachineLimits] = field(default_factory=list)

    def middle(self, kind: str, what: str) -> float:
        """Return the median of an attribute over the rounds, or 0.0 if all runs failed."""
        done = [getattr(run, what) for run in self.runs[kind] if not run.error]
        return median(done) if done else 0.0

    def machine(self) -> MachineLimits:
        bandwidths, rates = [m.bandwidth for m in self.machines], [m.rate for m in self.machines]
        return MachineLimits(median(bandwidths), median(rates))

    def agreeing(self, kind: str) -> tuple[int, int]:
        """Count the prompts with the same text as the engine's, and all prompts that both ran."""
        pairs = [
            (ours, theirs)
            for a, b in zip(self.runs[ENGINE], self.runs[kind], strict=True)
            for ours, theirs in zip(a.tokens, b.tokens, strict=False)
        ]
        return sum(ours == theirs for ours, theirs in pairs), len(pairs)


def rounds_for(label: str, batch: int) -> int:
    """Return the number of rounds: more where they are short and noise is large."""
    if label == "demo":
        return 5 if batch < 32 else 3
    return 3 if batch < 32 else 2


def prompts(batch: int, vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(PROMPT)] for _ in range(batch)]


def cost_of(folder: Path) -> tuple[ModelCost, int]:
    """Return the cost of the model's step, and the size of its vocabulary."""
    config = load_config(folder)
    model = DecoderModel(config, load_weights(folder, config, torch.float32, CPU), PROMPT + NEW)
    kv_bytes = config.kv_format("exact", "wide", 4).bytes_per_token
    return ModelCost.of(model, kv_bytes), config.vocab_size


def compete(
    children: list[ContestantProcess], cost: ModelCost, vocab: int, batch: int, rounds: int
) -> EngineResults:
    found = EngineResults()
    warm = ContestantJob(prompts=prompts(batch, vocab, seed=rounds), new_tokens=3)
    for child in children:
        child.ask(warm)
    for turn in range(rounds):
        job = ContestantJob(prompts=prompts(batch, vocab, seed=turn), new_tokens=NEW)
        for child in children:
            run = child.ask(job)
            if run.error and child.kind == ENGINE:
                raise RuntimeError(f"the engine did not run: {run.error}")
            found.runs[child.kind].append(run)
        found.machines.append(measure(cost.weight_bytes, GEMM, torch.float32, CPU))
    return found


def rows(at: str, batch: int, cost: ModelCost, found: EngineResults) -> list[ResultRow]:
    machine = found.machine()
    step = cost.decode(machine, batch, PROMPT + NEW / 2)
    prompt = cost.prefill(machine, batch, PROMPT)
    least_s = prompt.seconds + (NEW - 1) * step.seconds
    decode = found.middle(ENGINE, "decode_rate")
    whole = batch * NEW / found.middle(ENGINE, "wall_s")
    out = [*against_peers(f"{at}: decode", decode, {
        kind: found.middle(kind, "decode_rate") for kind in PEERS
    })]  # fmt: skip
    for limit, seconds in {"bytes": step.bytes_s, step.wall: step.seconds}.items():
        rate = batch / seconds
        text = f"floor ({limit}) {rate:.0f} tok/s"
        out.append(ResultRow(f"{at}: decode", decode, "tok/s", text, decode / rate))
    out += against_peers(f"{at}: whole", whole, {
        kind: batch * NEW / wall if (wall := found.middle(kind, "wall_s")) else 0.0
        for kind in PEERS
    })  # fmt: skip
    most = batch * NEW / least_s
    out.append(ResultRow(f"{at}: whole", whole, "tok/s", f"floor {most:.0f} tok/s", whole / most))
    for kind in PEERS:
        same, of = found.agreeing(kind)
        if of:
            out.append(
                ResultRow(f"{at}: same text", same, "prompts", f"{kind}, {of} prompts", same / of)
            )
    return out


def against_peers(name: str, ours: float, peers: dict[str, float]) -> Iterator[ResultRow]:
    """Yield one row per peer that ran, the fastest first."""
    for kind, rate in sorted(peers.items(), key=lambda item: -item[1]):
        if rate:
            yield ResultRow(name, ours, "tok/s", f"{kind} {rate:.0f} tok/s", ours / rate)


def run_model(
    label: str, folder: Path, children: list[ContestantProcess], rounds: int | None
) -> list[ResultRow]:
    cost, vocab = cost_of(folder)
    for child in children:
        child.ask(ContestantJob(load=str(folder)))
    found: list[ResultRow] = []
    machines: list[MachineLimits] = []
    for batch in BATCHES:
        result = compete(children, cost, vocab, batch, rounds or rounds_for(label, batch))
        found += rows(f"{label}, batch {batch}", batch, cost, result)
        machines += result.machines
    size = f"{cost.weight_bytes / 1e6:.0f} MB read"
    speed = median([m.bandwidth for m in machines]) / 1e9
    rate = median([m.rate for m in machines]) / 1e9
    return [
        *found,
        ResultRow(f"{label}: bandwidth, {size}", speed, "GB/s"),
        ResultRow(f"{label}: rate of fp32 products of {GEMM}", rate, "GFLOP/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the demo model, one round")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    core = quiet_core()
    found: list[ResultRow] = []
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        models = [("demo", demo_path())]
        if not quick:
            models.append(("100M", make(Path(home) / "random-100m", SHAPE_100M)))
        children = [ContestantProcess(kind, core) for kind in KINDS]
        for child in children:
            stack.callback(child.close)
        if core is not None:
            os.sched_setaffinity(0, {core})
        for label, folder in models:
            found += run_model(label, folder, children, 1 if quick else None)
        for child in children:
            if child.error:
                print(f"{child.kind} did not run: {child.error}")
    finish("engine", found)


if __name__ == "__main__":
    main()
