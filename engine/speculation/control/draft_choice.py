"""Choice of the number of draft nodes for each sequence of one step, and the latency curve it uses.

A step over B sequences with n nodes yields B tokens plus the accepted nodes. The choice is a pure
function of acceptance rates and costs; it maximizes tokens per second,

    (B + sum of acceptance rates) / (seconds of the pass over B + n rows + seconds of proposing)

For one sequence whose nodes are each accepted with probability a once their parent is, this is the
speed-up of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
Decoding" (2023), section 3; if a verification costs as much as a plain step, theorem 3.8.

LatencyCurve holds the seconds of a model pass by its number of rows. A line does not fit: on a CPU,
matrix products are prepared for certain numbers of rows (engine/model_config/config.py), so the
curve is a staircase; on a GPU, rows below the ridge point are free. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.model_config.config import padded_row_counts, padded_rows
from engine.scheduling.step_time import Coefficients

Vector: TypeAlias = NDArray[np.float64]

MIN_GAIN = 1e-4  # nodes with a lower acceptance rate are not considered
BUDGET_S = 1.0  # approximate seconds of ``calibrate``

REPEATS = 3
"""Measurements of each number of rows; the shortest one counts, as disturbances only add time."""

FIRST_ROW_COUNTS = (1, 32, 8, 2, 128, 4, 16, 64)
"""Row counts measured first; the first three are measured in any case."""


def expected_tokens(acceptance: float, nodes: int) -> float:
    """Return the expected tokens of one verified chain: (1 - a^(K+1)) / (1 - a) (equation 1)."""
    if acceptance >= 1.0:
        return nodes + 1.0
    return float((1.0 - acceptance ** (nodes + 1)) / (1.0 - acceptance))


def speedup(acceptance: float, nodes: int, cost: float, verification: float = 1.0) -> float:
    """Return the speed-up by chains of ``nodes`` tokens over plain steps: E[tokens] / (v + c K). A
    pass of the proposer costs c plain steps, and a verification v (theorem 3.8 has v = 1)."""
    return expected_tokens(acceptance, nodes) / (verification + cost * nodes)


@dataclass(frozen=True)
class BatchCosts:
    """Costs of one step over its batch, in seconds."""

    plain: float  # a step without drafts
    verify: Vector  # [N+1] the model's pass with 0 .. N nodes; N is at least B * most
    passes: NDArray[np.int64]  # [most+1] proposer passes for 0 .. most nodes of a sequence
    per_pass: float = 0.0  # each proposer pass
    per_node: float = 0.0  # each proposed node
    per_sequence: float = 0.0  # catching up with the text of each sequence that gets drafts
    most: int = 1 << 30  # nodes of the step

    def sequence_limits(self) -> NDArray[np.int64]:
        """Return the limits on nodes of a sequence worth trying: one node less saves a pass."""
        most = len(self.passes) - 1
        dearer = np.flatnonzero(np.diff(self.passes) > 0)
        return np.unique(np.append(dearer[dearer > 0], most))


@dataclass(frozen=True)
class DraftChoice:
    """Chosen draft lengths and their expected effect; all lengths are 0 without any gain."""

    counts: list[int]  # [B] nodes of each sequence
    tokens: float  # expected tokens of the step
    seconds: float
    speedup: float  # in tokens per second, over a plain step


def choose_draft_lengths(gains: Vector, rows: Vector, costs: BatchCosts) -> DraftChoice:
    """Return the best lengths that are not all zero; ``speedup`` tells whether they pay. gains: [B,
    most] probability that each node is requested, proposed and accepted; rows: [B, most]
    probability that it is requested and proposed. Each sequence gets the first nodes of its row.
    For each limit on the nodes of one sequence, nodes are taken in order of gain per row up to the
    best number. The result is optimal if every requested node is proposed and the gains of a
    sequence do not increase."""
    batch, most = gains.shape
    worth = np.minimum.accumulate(gains / np.maximum(rows, MIN_GAIN), axis=1).ravel()
    order = np.argsort(-worth, kind="stable")
    order = order[: min(int(np.count_nonzero(worth > MIN_GAIN)), costs.most)]
    if not len(order):
        return DraftChoice([0] * batch, float(batch), costs.plain, 1.0)
    node = order % most
    limits = costs.sequence_limits()
    taken = node < limits[:, None]  # [limits, nodes in order]
    tokens = batch + np.cumsum(gains.ravel()[order] * taken, axis=1)
    verified = np.cumsum(rows.ravel()[order] * taken, axis=1)
    seconds = interpolate(costs.verify, verified) + costs.per_node * verified
    seconds += (costs.per_pass * costs.passes[limits])[:, None]
    seconds += costs.per_sequence * np.cumsum(node == 0)
    rate = np.where(taken, tokens / seconds, 0.0)
    best = int(rate.argmax())
    limit, cut = divmod(best, len(order))
    chosen = order[: cut + 1][taken[limit, : cut + 1]]
    counts = np.bincount(chosen // most, minlength=batch).tolist()
    brings, takes = float(tokens[limit, cut]), float(seconds[limit, cut])
    return DraftChoice(counts, brings, takes, brings / takes * costs.plain / batch)


def interpolate(seconds: Vector, rows: Vector) -> Vector:
    """Return ``seconds`` at expected (fractional) numbers of ``rows``, linear between integers.
    This is exact where one row is uncertain."""
    whole = rows.astype(np.int64)
    low = seconds[whole]
    high = seconds[np.minimum(whole + 1, len(seconds) - 1)]
    between: Vector = low + (high - low) * (rows - whole)
    return between


class LatencyCurve:
    """Seconds of a model pass by its number of rows. ``seconds`` [R] are passes with 1 .. R rows
    and are made monotonic; beyond R the curve continues as a line."""

    def __init__(self, seconds: Sequence[float] | Vector) -> None:
        self._table = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
        assert len(self._table) and self._table[0] > 0
        half = len(self._table) // 2
        rise = self._table[-1] - self._table[half]
        self._slope = rise / max(1, len(self._table) - 1 - half)

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
    first = [rows for rows in FIRST_ROW_COUNTS if rows <= counts[-1]]
    measured: dict[int, float] = {}
    run(1)
    for rows in first + [rows for rows in counts if rows not in first]:
        longest = max(measured.values(), default=0.0)
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


def linear_curve(fitted: Coefficients, most_rows: int) -> LatencyCurve:
    """Return the curve of the fitted step time model, for engines without a calibration."""
    rows = np.arange(1, most_rows + 1)
    return LatencyCurve(np.maximum(fitted.step + fitted.row * rows, 1e-7))
