"""The latency curve: measured seconds of a model pass by its number of rows.

A line does not fit: on a CPU, matrix products are prepared for certain numbers of rows
(engine/model_config/config.py), so the curve is a staircase; on a GPU, rows below the ridge point
are free. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.model_config.config import padded_row_counts, padded_rows
from protocol.performance.draft_choice import Vector

BUDGET_S = 1.0  # approximate seconds of ``calibrate``

REPEATS = 3
"""Measurements of each number of rows; the shortest one counts, as disturbances only add time."""

FIRST_ROW_COUNTS = (1, 32, 8, 2, 128, 4, 16, 64)
"""Row counts measured first, with the largest one in fourth place; the first three are measured in
any case."""


class LatencyCurve:
    """Seconds of a model pass by its number of rows. ``seconds`` [R] are passes with 1 .. R rows
    and are made monotonic; beyond R the curve continues as a line. ``hinge`` describes it in short
    (``_fit_hinge``)."""

    def __init__(self, seconds: Sequence[float] | Vector) -> None:
        self._table = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
        assert len(self._table) and self._table[0] > 0
        half = len(self._table) // 2
        rise = self._table[-1] - self._table[half]
        self._slope = rise / max(1, len(self._table) - 1 - half)
        self.hinge = _fit_hinge(self._table)

    def __call__(self, rows: int) -> float:
        """Return the seconds of one pass."""
        return float(self.span(rows, rows)[0])

    def span(self, first: int, last: int) -> Vector:
        """Return the seconds [last - first + 1] of passes with ``first`` .. ``last`` rows."""
        assert 1 <= first <= last
        if last > len(self._table):
            beyond = np.arange(1, last - len(self._table) + 1) * self._slope
            self._table = np.append(self._table, self._table[-1] + beyond)
        return self._table[first - 1 : last]


def _fit_hinge(table: Vector) -> tuple[float, float]:
    """Return a curve as flat up to some rows and rising beyond them: seconds of each row there, and
    those rows, by least squares. Few rows weigh more, as they run more often. table: [R]."""
    extra, rows = table - table[0], np.arange(1.0, len(table) + 1)
    free = np.arange(1.0, len(rows) // 2 + 2, max(1, len(rows) // 64))  # [H] candidates
    beyond = np.maximum(0.0, rows - free[:, None])  # [H, R]
    weighted = beyond / rows
    slopes = (weighted @ extra) / np.maximum((weighted * beyond).sum(axis=1), 1e-9)
    errors = ((extra - slopes[:, None] * beyond) ** 2 / rows).sum(axis=1)
    best = int(errors.argmin())
    return float(slopes[best]), float(free[best])


def calibrate(
    run: Callable[[int], None],
    most_rows: int,
    clock: Callable[[], float],
    budget_s: float = BUDGET_S,
) -> LatencyCurve:
    """Measure the latency curve within about ``budget_s``; row counts in between are interpolated.
    ``run(rows)`` computes one pass of the model and returns when it has completed."""
    ends = clock() + budget_s
    counts = padded_row_counts(max(most_rows, FIRST_ROW_COUNTS[1]))
    # The largest one soon: passes of more rows than any recorded step has take much longer.
    first = [rows for rows in FIRST_ROW_COUNTS if rows <= counts[-1]]
    if counts[-1] not in first:
        first.insert(3, counts[-1])
    measured: dict[int, float] = {}
    run(1)
    for rows in first + [rows for rows in counts if rows not in first]:
        longest = max(measured.values(), default=0.0)
        longest *= max(1.0, rows / max(measured, default=rows))
        # The first pass of a size may include its warm-up; with two passes the other one counts.
        repeats = REPEATS if len(counts) * REPEATS * longest < 2 * budget_s else 2
        if len(measured) < 3 or clock() + repeats * longest < ends:
            measured[rows] = min(_timed(run, rows, clock) for _ in range(repeats))
    knots = sorted(measured)
    return curve_from_knots(knots, [measured[rows] for rows in knots])


def _timed(run: Callable[[int], None], rows: int, clock: Callable[[], float]) -> float:
    began = clock()
    run(rows)
    return max(clock() - began, 1e-7)


def curve_from_knots(knots: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
    """Return the curve through measured row counts ``knots`` [K], in ascending order. Each number
    of rows takes as long as the next padded one; padded counts between knots are interpolated. A
    knot slower than a larger one was disturbed and is lowered to it."""
    times = np.minimum.accumulate(np.asarray(seconds, dtype=np.float64)[::-1])[::-1]
    padded = [padded_rows(rows) for rows in range(1, knots[-1] + 1)]
    return LatencyCurve(np.interp(padded, knots, times))
