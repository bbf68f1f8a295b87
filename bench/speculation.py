"""Speculation beside plain decoding of the same prompts, and beside what the formula predicts.

    python -m bench.speculation [--quick] [--target demo|grown|copying] [--proposer NAME] [--cpu]

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
(bench/speculation_seen.py). Lengths that would verify more than 80 rows at once are left out.
--cpu counts the thread's own seconds, where others use the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.engine import quiet_core
from bench.report import finish
from bench.speculation_field import Field, Plan
from bench.speculation_report import Cell, tables
from bench.speculation_targets import targets

TEMPERATURE = 0.8
DRAWN = ("draft", "eagle")
"""Proposers that are measured at TEMPERATURE as well."""

QUICK = Plan((1, 4), (2, 4), 0.3, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few batch sizes and lengths, short")
    parser.add_argument("--target", help="only those whose name begins so")
    parser.add_argument("--proposer", help="only this one")
    parser.add_argument("--cpu", action="store_true", help="CPU time in the place of wall time")
    chosen = parser.parse_args()
    plan = QUICK if chosen.quick else Plan()
    if chosen.cpu:
        plan = replace(plan, clock=time.thread_time)
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
                    if name in DRAWN:
                        cells += contest.cells(name, TEMPERATURE)
    print(*tables(cells), sep="\n")
    print(f"{time.perf_counter() - began:.0f} s")
    finish("speculation", [row for cell in cells for row in cell.rows()])


if __name__ == "__main__":
    main()
