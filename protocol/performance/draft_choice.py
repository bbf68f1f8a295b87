"""Choice of the number of draft nodes for each sequence of one step.

A step over B sequences with n nodes yields B tokens plus the accepted nodes. The choice is a pure
function of acceptance rates and costs; it maximizes tokens per second,

    (B + sum of acceptance rates) / (seconds of the pass over B + n rows + seconds of proposing)

For one sequence whose nodes are each accepted with probability a once their parent is, this is the
speed-up of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
Decoding" (2023), section 3; if a verification costs as much as a plain step, theorem 3.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]

MIN_GAIN = 1e-4  # nodes with a lower acceptance rate are not considered


def expected_tokens(acceptance: float, nodes: int) -> float:
    """Return the expected tokens of one verified chain: (1 - a^(K+1)) / (1 - a) (equation 1)."""
    if acceptance >= 1.0:
        return nodes + 1.0
    return float((1.0 - acceptance ** (nodes + 1)) / (1.0 - acceptance))


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
    padded: Vector | None = None
    """[most+1] Seconds of the model's pass where every sequence has room for 0 .. most nodes, as in
    recorded steps, which have a fixed number of rows; None: it takes as long as its nodes."""

    def sequence_limits(self) -> NDArray[np.int64]:
        """Return the limits on nodes of a sequence worth trying: one more takes another pass, or
        more room."""
        most = len(self.passes) - 1
        dearer = np.diff(self.passes) > 0
        if self.padded is not None:
            dearer |= np.diff(self.padded) > 0
        found = np.flatnonzero(dearer)
        return np.unique(np.append(found[found > 0], most))

    def pass_s(self, limits: NDArray[np.int64], nodes: Vector) -> Vector:
        """Return the seconds [L, n] of the model's pass with expected ``nodes`` [L, n] of which no
        sequence has more than ``limits`` [L]."""
        if self.padded is None:
            return interpolate(self.verify, nodes)
        return np.repeat(self.padded[limits][:, None], nodes.shape[1], axis=1)


@dataclass(frozen=True)
class DraftChoice:
    """Chosen draft lengths and their expected effect; all lengths are 0 without any gain."""

    counts: list[int]  # [B] nodes of each sequence
    tokens: float  # expected tokens of the step
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
    order = order[: int(np.count_nonzero(worth > MIN_GAIN))]
    if not len(order):
        return DraftChoice([0] * batch, float(batch), 1.0)
    node = order % most
    limits = costs.sequence_limits()
    taken = node < limits[:, None]  # [limits, nodes in order]
    taken &= np.cumsum(taken, axis=1) <= costs.most
    tokens = batch + np.cumsum(gains.ravel()[order] * taken, axis=1)
    verified = np.cumsum(rows.ravel()[order] * taken, axis=1)
    seconds = costs.pass_s(limits, verified) + costs.per_node * verified
    seconds += (costs.per_pass * costs.passes[limits])[:, None]
    seconds += costs.per_sequence * np.cumsum(node == 0)
    rate = np.where(taken, tokens / seconds, 0.0)
    best = int(rate.argmax())
    limit, cut = divmod(best, len(order))
    chosen = order[: cut + 1][taken[limit, : cut + 1]]
    counts = np.bincount(chosen // most, minlength=batch).tolist()
    brings, takes = float(tokens[limit, cut]), float(seconds[limit, cut])
    return DraftChoice(counts, brings, brings / takes * costs.plain / batch)


def interpolate(seconds: Vector, rows: Vector) -> Vector:
    """Return ``seconds`` at expected (fractional) numbers of ``rows``, linear between integers.
    This is exact where one row is uncertain."""
    whole = rows.astype(np.int64)
    low = seconds[whole]
    high = seconds[np.minimum(whole + 1, len(seconds) - 1)]
    between: Vector = low + (high - low) * (rows - whole)
    return between
