"""Speculation beside plain decoding of the same prompts, and beside the formula's prediction.

    python -m bench.speculation [--quick] [--target demo|grown|copying] [--proposer NAME] [--cpu]

One compute thread on one core, fp32, exact KV; batches of 1 to 64 prompts of held-out code. The
targets are the demo model, a model of 96 M parameters that computes the same function
(grown_model.py), so that drafts and heads agree with it as often, and for prompt lookup a model
made by hand that repeats its prompt (copying_model.py). Each proposer drafts at fixed lengths and
at those that the controller decides; random tokens are a proposer, too.

All contestants decode the same sequences in turns, in slices of about 80 ms. A speed-up is the
seconds per token of plain decoding over those with drafts, with the interval of resampled slices.
Texts are compared, and a difference ends the benchmark. Beside a speed-up at a fixed length stands
that of the formula, from the acceptance, the model passes and the drafting time that the same run
measured (measurements.py). Lengths that verify more than 80 rows at once are left out. ``--cpu``
counts the thread's CPU seconds, for machines that others use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.lib.report import finish
from bench.lib.roofline import CPU, quiet_core
from bench.speculation.contestants import (
    LONGEST,
    SETTLE_TOKENS,
    DecodingContestant,
    DecodingLoad,
    Slices,
    compete,
)
from bench.speculation.measurements import (
    CONTROLLER,
    Clock,
    SpeedupCell,
    StepTotals,
    speedup,
    tables,
)
from bench.speculation.targets import SpeculationTarget, targets
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.model_config.config import padded_row_counts
from engine.speculation.control.draft_lengths import FixedDraftLength
from protocol.block_keys import BLOCK_TOKENS

LENGTHS = (1, 2, 4, 8)
MOST = 8
MOST_ROWS = 80
TEXT = 96
DRAWN_BATCHES = (1, 4, 16)
SLICE_S = 0.08
LEARN = Slices(2, TEXT)
"""Slices that the controller observes before it is measured: two texts at the first batch."""


@dataclass(frozen=True)
class SpeculationPlan:
    """How much to measure of each proposer."""

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    lengths: Sequence[int] = LENGTHS
    fixed_s: float = 0.5  # of each contestant
    controller_s: float = 1.4
    clock: Clock = time.perf_counter


class SpeculationContest:
    """The contestants of one target.

    Each has one engine for all batch sizes and proposers, so that prompts are computed once.
    """

    def __init__(self, target: SpeculationTarget, plan: SpeculationPlan) -> None:
        self._target, self._plan = target, plan
        self._batches = [b for b in plan.batches if b in (target.batches or plan.batches)]
        most = max(self._batches)
        self._prompts = list(itertools.islice(target.prompts, max(8, most)))
        self._config = load_config(target.folder)
        self._weights = load_weights(target.folder, self._config, torch.float32, CPU)
        longest = max(map(len, self._prompts))
        each = -(-(longest + SETTLE_TOKENS + TEXT) // BLOCK_TOKENS) + 3
        self._sizes = most, max(each * most, LONGEST // BLOCK_TOKENS) + 2 * len(self._prompts)
        model = DecoderModel(self._config, self._weights, LONGEST)
        for rows in padded_row_counts(MOST_ROWS):
            model.warm_up(rows)
        self._plain = self._contestant()
        self._fixed = {k: self._contestant() for k in plan.lengths}
        self._controlled = self._contestant()

    def _contestant(self) -> DecodingContestant:
        return DecodingContestant(self._config, self._weights, *self._sizes, self._plan.clock)

    def cells(self, name: str, temperature: float = 0.0) -> Iterator[SpeedupCell]:
        """Measure one proposer; at a temperature, only some batch sizes are measured."""
        make, plan = self._target.proposers[name], self._plan
        subject = f"{self._target.name}, {name}"
        if temperature:
            subject += f" at temperature {temperature:g}"
        lengths = () if name == "random" else plan.lengths
        for k in lengths:
            self._fixed[k].equip(make, k, FixedDraftLength(k))
        self._controlled.equip(make, MOST, None)
        compete([self._controlled], self._loads(self._batches[0], temperature), LEARN)
        for batch in [b for b in self._batches if not temperature or b in DRAWN_BATCHES]:
            loads = self._loads(batch, temperature)
            some = {k: self._fixed[k] for k in lengths if batch * (k + 1) <= MOST_ROWS}
            yield from self._measure(subject, loads, some, plan.fixed_s, 4)
            alone = {CONTROLLER: self._controlled}
            yield from self._measure(subject, loads, alone, plan.controller_s, 12)

    def _loads(self, batch: int, temperature: float) -> list[DecodingLoad]:
        rounds = len(self._prompts) // batch
        parts = [self._prompts[i * batch : (i + 1) * batch] for i in range(rounds)]
        return [DecodingLoad(part, TEXT, temperature) for part in parts]

    def _measure(
        self,
        subject: str,
        loads: Sequence[DecodingLoad],
        others: Mapping[int, DecodingContestant],
        seconds: float,
        least: int,
    ) -> Iterator[SpeedupCell]:
        batch, plain = len(loads[0].prompts), self._plain
        if not others:
            return
        each = self._step_s(loads[0])
        tokens = min(TEXT // 2, max(TEXT // 12, round(SLICE_S / each)))
        slices = Slices(max(least, round(seconds / (tokens * each))), tokens)
        taken, *found = compete([plain, *others.values()], loads, slices)
        for (length, contestant), times in zip(others.items(), found, strict=True):
            ratio = speedup(taken, times)
            cell = SpeedupCell(subject, batch, length, ratio, plain.seen, contestant.seen)
            for row in cell.rows():
                print(f"{row.name}: {row.value:.3f} ({row.against})", flush=True)
            yield cell

    def _step_s(self, load: DecodingLoad) -> float:
        """Return the seconds of a plain decode step."""
        self._plain.seen = StepTotals()
        self._plain.start(load)
        taken = self._plain.slice(6 * len(load.prompts))
        self._plain.stop()
        return taken.seconds / 6


TEMPERATURE = 0.8
DRAWN = ("draft", "eagle")
"""Names of the proposers that are measured at TEMPERATURE as well."""

QUICK = SpeculationPlan((1, 4), (2, 4), 0.3, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few batch sizes and lengths, short")
    parser.add_argument("--target", help="only those whose name begins so")
    parser.add_argument("--proposer", help="only this one")
    parser.add_argument("--cpu", action="store_true", help="CPU time in the place of wall time")
    chosen = parser.parse_args()
    plan = QUICK if chosen.quick else SpeculationPlan()
    if chosen.cpu:
        plan = replace(plan, clock=time.thread_time)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    core = quiet_core()
    if core is not None:
        os.sched_setaffinity(0, {core})
    cells: list[SpeedupCell] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        for target in targets(Path(home)):
            if chosen.target and not target.name.startswith(chosen.target):
                continue
            names = [n for n in target.proposers if chosen.proposer in (None, n)]
            if names:
                contest = SpeculationContest(target, plan)
                for name in names:
                    cells += contest.cells(name)
                    if name in DRAWN:
                        cells += contest.cells(name, TEMPERATURE)
    print(*tables(cells), sep="\n")
    print(f"{time.perf_counter() - began:.0f} s")
    finish("speculation", [row for cell in cells for row in cell.rows()])


if __name__ == "__main__":
    main()
