"""All contestants of one target, and what they are measured at."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.engine import CPU
from bench.speculation_report import CONTROLLER, Cell
from bench.speculation_runs import LONGEST, SETTLE_TOKENS, Contestant, Load, Slices, compete
from bench.speculation_seen import Clock, Seen, speedup
from bench.speculation_targets import Target
from engine.checkpoint import load_config
from engine.model import Model
from engine.rows import row_counts
from engine.speculation.lengths import FixedLength
from engine.weights import load_weights
from protocol.blocks import BLOCK_TOKENS

LENGTHS = (1, 2, 4, 8)
MOST = 8
MOST_ROWS = 80
TEXT = 96
DRAWN_BATCHES = (1, 4, 16)
SLICE_S = 0.08
LEARN = Slices(2, TEXT)
"""What the controller has seen of a proposer before it counts: two texts at the first batch."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    lengths: Sequence[int] = LENGTHS
    fixed_s: float = 0.5  # of each contestant
    controller_s: float = 1.4
    clock: Clock = time.perf_counter


class Field:
    """The contestants of one target. Each has an engine, for all batch sizes and proposers: so the
    prompts are computed once."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self._target, self._plan = target, plan
        self._batches = [b for b in plan.batches if b in (target.batches or plan.batches)]
        most = max(self._batches)
        self._prompts = list(itertools.islice(target.prompts, max(8, most)))
        self._config = load_config(target.folder)
        self._weights = load_weights(target.folder, self._config, torch.float32, CPU)
        longest = max(map(len, self._prompts))
        each = -(-(longest + SETTLE_TOKENS + TEXT) // BLOCK_TOKENS) + 3
        self._sizes = most, max(each * most, LONGEST // BLOCK_TOKENS) + 2 * len(self._prompts)
        model = Model(self._config, self._weights, LONGEST)
        for rows in row_counts(MOST_ROWS):
            model.warm(rows)
        self._plain = self._contestant()
        self._fixed = {k: self._contestant() for k in plan.lengths}
        self._controlled = self._contestant()

    def _contestant(self) -> Contestant:
        return Contestant(self._config, self._weights, *self._sizes, self._plan.clock)

    def cells(self, name: str, temperature: float = 0.0) -> Iterator[Cell]:
        """Of one proposer; at a temperature, of some batch sizes only."""
        make, plan = self._target.proposers[name], self._plan
        subject = f"{self._target.name}, {name}"
        if temperature:
            subject += f" at temperature {temperature:g}"
        lengths = () if name == "random" else plan.lengths
        for k in lengths:
            self._fixed[k].equip(make, k, FixedLength(k))
        self._controlled.equip(make, MOST, None)
        compete([self._controlled], self._loads(self._batches[0], temperature), LEARN)
        for batch in [b for b in self._batches if not temperature or b in DRAWN_BATCHES]:
            loads = self._loads(batch, temperature)
            some = {k: self._fixed[k] for k in lengths if batch * (k + 1) <= MOST_ROWS}
            yield from self._measure(subject, loads, some, plan.fixed_s, 4)
            alone = {CONTROLLER: self._controlled}
            yield from self._measure(subject, loads, alone, plan.controller_s, 12)

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
        least: int,
    ) -> Iterator[Cell]:
        batch, plain = len(loads[0].prompts), self._plain
        if not others:
            return
        each = self._step_s(loads[0])
        tokens = min(TEXT // 2, max(TEXT // 12, round(SLICE_S / each)))
        slices = Slices(max(least, round(seconds / (tokens * each))), tokens)
        taken, *found = compete([plain, *others.values()], loads, slices)
        for (length, contestant), times in zip(others.items(), found, strict=True):
            ratio = speedup(taken, times)
            cell = Cell(subject, batch, length, ratio, plain.seen, contestant.seen)
            for row in cell.rows():
                print(f"{row.name}: {row.value:.3f} ({row.against})", flush=True)
            yield cell

    def _step_s(self, load: Load) -> float:
        """Of a plain step."""
        self._plain.seen = Seen()
        self._plain.start(load)
        taken = self._plain.slice(6 * len(load.prompts))
        self._plain.stop()
        return taken.seconds / 6
