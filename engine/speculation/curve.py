"""Seconds of a pass of the model, against its rows: measured at the start. Torch-free.

A line does not do: on a CPU products are made for certain numbers of rows (engine/rows.py), so that
the curve is a staircase; a GPU computes up to its ridge for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.rows import padded_rows, row_counts
from engine.speculation.choice import Vector
from engine.step_time import Coefficients

BUDGET_S = 1.0
"""For all of ``calibrate``, about."""

REPEATS = 3
"""Of each number of rows; the shortest counts: whatever disturbs a pass makes it longer."""

FIRST = (1, 32, 8, 2, 128, 4, 16, 64)
"""Rows that come first: the three that are measured in any case, and what matters most."""


class Curve:
    """``seconds`` [R] of passes with 1 .. R rows, never falling; beyond R it goes on as a line."""

    def __init__(self, seconds: Sequence[float] | Vector) -> None:
        self._table = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
        assert len(self._table) and self._table[0] > 0
        half = len(self._table) // 2
        rise = self._table[-1] - self._table[half]
        self._slope = rise / max(1, len(self._table) - 1 - half)

    def __call__(self, rows: int) -> float:
        """Of one pass, in seconds."""
        return float(self.span(rows, rows)[0])

    def span(self, first: int, last: int) -> Vector:
        """[last - first + 1] of the passes with ``first`` .. ``last`` rows."""
        assert 1 <= first <= last
        if last > len(self._table):
            beyond = np.arange(1, last - len(self._table) + 1) * self._slope
            self._table = np.append(self._table, self._table[-1] + beyond)
        return self._table[first - 1 : last]


def calibrate(
    run: Callable[[int], None],
    most_rows: int,
    clock: Callable[[], float],
    budget_s: float = BUDGET_S,
) -> Curve:
    """Measure ``run(rows)``, one pass of the model over so many rows, which has ended when it
    returns, as far as ``budget_s`` goes; what is not measured lies on lines."""
    ends = clock() + budget_s
    counts = row_counts(max(most_rows, FIRST[1]))
    first = [rows for rows in FIRST if rows <= counts[-1]]
    measured: dict[int, float] = {}
    run(1)
    for rows in first + [rows for rows in counts if rows not in first]:
        longest = max(measured.values(), default=0.0)
        # The first pass of a size may have to be made ready; it is not the shortest then.
        repeats = REPEATS if len(counts) * REPEATS * longest < 2 * budget_s else 2
        if len(measured) < 3 or clock() + repeats * longest < ends:
            measured[rows] = min(_timed(run, rows, clock) for _ in range(repeats))
    knots = sorted(measured)
    return from_knots(knots, [measured[rows] for rows in knots])


def _timed(run: Callable[[int], None], rows: int, clock: Callable[[], float]) -> float:
    began = clock()
    run(rows)
    return max(clock() - began, 1e-7)


def from_knots(knots: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Each number of rows is computed as the next one that products are made for, and takes as
    long; between ``knots`` [K] (ascending) those lie on lines."""
    # What is longer than a pass over more rows was disturbed.
    times = np.minimum.accumulate(np.asarray(seconds, dtype=np.float64)[::-1])[::-1]
    padded = [padded_rows(rows) for rows in range(1, knots[-1] + 1)]
    return Curve(np.interp(padded, knots, times))


def linear(known: Coefficients, most_rows: int) -> Curve:
    """From the fitted model of a step's duration, where nothing was measured."""
    rows = np.arange(1, most_rows + 1)
    return Curve(np.maximum(known.step + known.row * rows, 1e-7))
