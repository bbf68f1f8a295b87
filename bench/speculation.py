"""Speculation beside plain decoding of the same prompts, and beside what the formula predicts.

    python -m bench.speculation [--quick] [--target demo|grown|copying] [--proposer NAME]

One compute thread on one core, fp32, exact KV. Held-out code, 64 tokens of each file, then the
text; batch 1 to 64; the demo model, and one of 96 M parameters that computes the same function
(bench/grown_model.py), so that drafts and heads agree with it as often. Each proposer drafts at
fixed lengths and as the controller decides; random tokens are a proposer, too. For prompt lookup a
model made by hand copies its prompt (bench/copying_model.py).

All contestants hold the same sequences, and take turns within the text: a slice of some 80 ms each.
The batch stays what it is. A speed-up is plain seconds for a token over those with drafts, with the
interval of resampled slices. Texts are compared; a difference ends the benchmark.

Beside a speed-up at a fixed length stands the formula's, from what was measured in the same run:
acceptance, the model's passes with drafts and without, and the time of proposing
(bench/speculation_seen.py). Lengths that would verify more than 160 rows at once are left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.copying_model import PERIOD, make_copying
from bench.engine import CPU, quiet_core
from bench.grown_heads import grow_heads
from bench.grown_model import grow
from bench.random_model import SHAPE_100M
from bench.report import finish
from bench.speculation_proposers import guess, ngram, of_folder
from bench.speculation_report import CONTROLLER, Cell, tables
from bench.speculation_runs import LONGEST, Contestant, Load, Make, Slices, compete
from bench.speculation_seen import Seen, speedup
from bench.speculation_text import Texts, Tokens
from cluster.models import demo_path
from engine.checkpoint import load_config
from engine.model import Model
from engine.rows import row_counts
from engine.speculation.lengths import FixedLength
from engine.speculation.source import Method
from engine.weights import load_weights
from protocol.blocks import BLOCK_TOKENS

HEADS: tuple[Method, ...] = ("medusa", "eagle")
LENGTHS = (1, 2, 4, 8)
MOST = 8
MOST_ROWS = 160
PROMPT = 2 * BLOCK_TOKENS + 1  # so that all but one token are found again
TEXT = 96
TEMPERATURE = 0.8
SLICE_S = 0.08
LEARN = Slices(2, TEXT)
"""What the controller has seen of a proposer before it counts: two texts at the first batch."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    lengths: Sequence[int] = LENGTHS
    fixed_s: float = 0.8  # of each contestant
    controller_s: float = 2.0


QUICK = Plan((1, 4), (2, 4), 0.3, 0.6)


@dataclass(frozen=True)
class Target:
    """A model, what drafts for it, and what it is given to say."""

    name: str
    folder: Path
    proposers: Mapping[str, Make]
    prompts: Iterator[Tokens]
    drawn: Sequence[str] = field(default=())  # proposers that are run at TEMPERATURE as well


class Field:
    """The contestants of one target. Each has an engine, for all batch sizes and proposers: so the
    prompts are computed once."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self._target, self._plan = target, plan
        most = max(plan.batches)
        self._prompts = list(itertools.islice(target.prompts, max(8, most)))
        self._config = load_config(target.folder)
        self._weights = load_weights(target.folder, self._config, torch.float32, CPU)
        longest = max(map(len, self._prompts))
        each = -(-(longest + TEXT) // BLOCK_TOKENS) + 3
        self._sizes = most, max(each * most, LONGEST // BLOCK_TOKENS) + 2 * len(self._prompts)
        model = Model(self._config, self._weights, LONGEST)
        for rows in row_counts(MOST_ROWS):
            model.warm(rows)
        self._plain = self._contestant()
        self._fixed = {k: self._contestant() for k in plan.lengths}
        self._controlled = self._contestant()

    def _contestant(self) -> Contestant:
        return Contestant(self._config, self._weights, *self._sizes)

    def cells(self, name: str, temperature: float = 0.0) -> Iterator[Cell]:
        """Of one proposer."""
        make, plan = self._target.proposers[name], self._plan
        subject = f"{self._target.name}, {name}"
        if temperature:
            subject += f" at temperature {temperature:g}"
        lengths = () if name == "random" else plan.lengths
        for k in lengths:
            self._fixed[k].equip(make, k, FixedLength(k))
        self._controlled.equip(make, MOST, None)
        compete([self._controlled], self._loads(plan.batches[0], temperature), LEARN)
        for batch in plan.batches:
            loads = self._loads(batch, temperature)
            some = {k: self._fixed[k] for k in lengths if batch * (k + 1) <= MOST_ROWS}
            yield from self._measure(subject, loads, some, plan.fixed_s)
            alone = {CONTROLLER: self._controlled}
            yield from self._measure(subject, loads, alone, plan.controller_s)

    def _loads(self, batch: int, temperature: float) -> list[Load]:
        rounds = len(self._prompts) // batch
        parts = [self._prompts[i * batch : (i + 1) * batch] for i in range(rounds)]
        return [Load(part, TEXT, temperature) for part in parts]

    def _measure(
        self,
        subject: str,
        loads: Sequence[Load],
        others: Mapping[int, Contestant],
        seconds: float,
    ) -> Iterator[Cell]:
        batch, plain = len(loads[0].prompts), self._plain
        if not others:
            return
        each = self._step_s(loads[0])
        tokens = min(TEXT // 2, max(TEXT // 6, round(SLICE_S / each)))
        slices = Slices(max(4, round(seconds / (tokens * each))), tokens)
        taken, *found = compete([plain, *others.values()], loads, slices)
        for (length, contestant), times in zip(others.items(), found, strict=True):
            ratio = speedup(list(zip(taken, times, strict=True)))
            cell = Cell(subject, batch, length, ratio, plain.seen, contestant.seen)
            for row in cell.rows():
                print(f"{row.name}: {row.value:.3f} ({row.against})", flush=True)
            yield cell

    def _step_s(self, load: Load) -> float:
        """Of a plain step."""
        self._plain.seen = Seen()
        self._plain.start(load)
        each = self._plain.slice(4 * len(load.prompts)) * len(load.prompts)
        self._plain.stop()
        return each


def targets(home: Path) -> Iterator[Target]:
    """One at a time: each is made when it is its turn."""
    demo = demo_path()
    texts = Texts()
    heads = [kind for kind in HEADS if (demo.parent / kind / "model.safetensors").is_file()]
    draft = of_folder("draft", demo.parent / "draft", demo)
    made: dict[str, Make] = {"ngram": ngram(), "draft": draft, "random": guess()}
    for kind in heads:
        made[kind] = of_folder(kind, demo.parent / kind, demo)
    yield Target("demo", demo, made, texts.stretches(PROMPT), ("draft",))
    large = grow(demo, home / "grown")
    made = dict(made)
    for kind in heads:
        folder = grow_heads(demo.parent / kind, home / kind, SHAPE_100M)
        made[kind] = of_folder(kind, folder, large)
    yield Target("grown", large, made, texts.stretches(PROMPT), ("draft",))
    for name, shape in (("copying", {}), ("copying-100M", SHAPE_100M)):
        folder = make_copying(demo, home / name, shape)
        yield Target(name, folder, {"ngram": ngram()}, texts.stretches(PERIOD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few batch sizes and lengths, short")
    parser.add_argument("--target", help="only those whose name begins so")
    parser.add_argument("--proposer", help="only this one")
    chosen = parser.parse_args()
    plan = QUICK if chosen.quick else Plan()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    core = quiet_core()
    if core is not None:
        os.sched_setaffinity(0, {core})
    cells: list[Cell] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        for target in targets(Path(home)):
            if chosen.target and not target.name.startswith(chosen.target):
                continue
            names = [n for n in target.proposers if chosen.proposer in (None, n)]
            if names:
                contest = Field(target, plan)
                for name in names:
                    cells += contest.cells(name)
                    if name in target.drawn:
                        cells += contest.cells(name, TEMPERATURE)
    print(*tables(cells), sep="\n")
    print(f"{time.perf_counter() - began:.0f} s")
    finish("speculation", [row for cell in cells for row in cell.rows()])


if __name__ == "__main__":
    main()
