"""How much to propose to the sequences of one step: a pure function of gains and prices.

A step over B sequences with n nodes brings B tokens and the nodes that are accepted. Chosen is what
brings the most tokens a second,

    (B + sum of gains) / (seconds of the pass over B + n rows + seconds of proposing)

For one sequence whose every node is accepted with probability a once its parent is, this is the
speed-up of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
Decoding" (2023), section 3: with a verification that costs as much as a plain step, theorem 3.8.
Torch-free.
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

MIN_GAIN = 1e-4
"""Gains below it are none: such nodes are not even weighed."""


def expected_tokens(acceptance: float, nodes: int) -> float:
    """Tokens that one verification of a chain brings: (1 - a^(K+1)) / (1 - a) (equation 1)."""
    if acceptance >= 1.0:
        return nodes + 1.0
    return float((1.0 - acceptance ** (nodes + 1)) / (1.0 - acceptance))


def speedup(acceptance: float, nodes: int, cost: float, verification: float = 1.0) -> float:
    """Of proposing chains of ``nodes`` tokens over not proposing: E[tokens] / (v + c K), where a
    pass of the proposer costs c plain steps, and the verification v (theorem 3.8 has v = 1)."""
    return expected_tokens(acceptance, nodes) / (verification + cost * nodes)


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of one step over its batch."""

    plain: float  # that proposes nothing
    verify: Vector  # [N+1], of the model's pass with 0 .. N nodes; N not below B * most
    passes: NDArray[np.int64]  # [most+1], of the proposer, for 0 .. most nodes of a sequence
    a_pass: float = 0.0  # of each of these
    row: float = 0.0  # of each node that it proposes
    caught_up: float = 0.0  # of each sequence that it proposes to: of catching up with its text
    most: int = 1 << 30  # nodes of the step

    def limits(self) -> NDArray[np.int64]:
        """Numbers of nodes worth a look as the most for any sequence: one less saves a pass."""
        most = len(self.passes) - 1
        dearer = np.flatnonzero(np.diff(self.passes) > 0)
        return np.unique(np.append(dearer[dearer > 0], most))


@dataclass(frozen=True)
class DraftChoice:
    """What to propose, and what comes of it; all zero where there is nothing to gain."""

    counts: list[int]  # [B] nodes of each sequence
    tokens: float  # expected of the step
    seconds: float
    speedup: float  # in tokens per second, over a step that proposes nothing


def choose_draft_lengths(gains: Vector, rows: Vector, prices: BatchCosts) -> DraftChoice:
    """The best counts that are not all zero, however bad; whether they pay tells ``speedup``.

    gains: [B, most] probability that each node is asked for, proposed and accepted; rows: the same,
    that it is asked for and proposed. Each sequence gets the first nodes of its row. Nodes are
    taken in order of gain per row, as many as are best, under each limit on the nodes of one
    sequence. Where all that is asked for is proposed, and no gain is larger than that of the node
    before it, no other counts are better.
    """
    batch, most = gains.shape
    worth = np.minimum.accumulate(gains / np.maximum(rows, MIN_GAIN), axis=1).ravel()
    order = np.argsort(-worth, kind="stable")
    order = order[: min(int(np.count_nonzero(worth > MIN_GAIN)), prices.most)]
    if not len(order):
        return DraftChoice([0] * batch, float(batch), prices.plain, 1.0)
    node = order % most
    limits = prices.limits()
    taken = node < limits[:, None]  # [limits, nodes in order]
    tokens = batch + np.cumsum(gains.ravel()[order] * taken, axis=1)
    verified = np.cumsum(rows.ravel()[order] * taken, axis=1)
    seconds = interpolate(prices.verify, verified) + prices.row * verified
    seconds += (prices.a_pass * prices.passes[limits])[:, None]
    seconds += prices.caught_up * np.cumsum(node == 0)
    rate = np.where(taken, tokens / seconds, 0.0)
    best = int(rate.argmax())
    limit, cut = divmod(best, len(order))
    chosen = order[: cut + 1][taken[limit, : cut + 1]]
    counts = np.bincount(chosen // most, minlength=batch).tolist()
    brings, takes = float(tokens[limit, cut]), float(seconds[limit, cut])
    return DraftChoice(counts, brings, takes, brings / takes * prices.plain / batch)


def interpolate(seconds: Vector, rows: Vector) -> Vector:
    """Of an expected number of rows, between those of the whole numbers beside it: exact where one
    row is uncertain."""
    whole = rows.astype(np.int64)
    low = seconds[whole]
    high = seconds[np.minimum(whole + 1, len(seconds) - 1)]
    between: Vector = low + (high - low) * (rows - whole)
    return between


# MERGED engine.speculation.curve
# Seconds of a pass of the model, against its rows: measured at the start. Torch-free.
#
# A line does not do: on a CPU products are made for certain numbers of rows
# (engine/model_config/config.py), so that
# the curve is a staircase; a GPU computes up to its ridge for nothing.

BUDGET_S = 1.0
"""For all of ``calibrate``, about."""

REPEATS = 3
"""Of each number of rows; the shortest counts: whatever disturbs a pass makes it longer."""

FIRST_ROW_COUNTS = (1, 32, 8, 2, 128, 4, 16, 64)
"""Rows that come first: the three that are measured in any case, and what matters most."""


class LatencyCurve:
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
) -> LatencyCurve:
    """Measure ``run(rows)``, one pass of the model over so many rows, which has ended when it
    returns, as far as ``budget_s`` goes; what is not measured lies on lines."""
    ends = clock() + budget_s
    counts = padded_row_counts(max(most_rows, FIRST_ROW_COUNTS[1]))
    first = [rows for rows in FIRST_ROW_COUNTS if rows <= counts[-1]]
    measured: dict[int, float] = {}
    run(1)
    for rows in first + [rows for rows in counts if rows not in first]:
        longest = max(measured.values(), default=0.0)
        # The first pass of a size may have to be made ready; it is not the shortest then.
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
    """Each number of rows is computed as the next one that products are made for, and takes as
    long; between ``knots`` [K] (ascending) those lie on lines."""
    # What is longer than a pass over more rows was disturbed.
    times = np.minimum.accumulate(np.asarray(seconds, dtype=np.float64)[::-1])[::-1]
    padded = [padded_rows(rows) for rows in range(1, knots[-1] + 1)]
    return LatencyCurve(np.interp(padded, knots, times))


def linear_curve(known: Coefficients, most_rows: int) -> LatencyCurve:
    """From the fitted model of a step's duration, where nothing was measured."""
    rows = np.arange(1, most_rows + 1)
    return LatencyCurve(np.maximum(known.step + known.row * rows, 1e-7))
