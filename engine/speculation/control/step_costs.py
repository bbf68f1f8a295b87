"""Costs of plain and speculative steps: the latency curve, corrected by observed step times.

    plain step         p * (curve(B) + kv)
    speculative step   v * (curve(B) + curve(B + n + chunk) - curve(B + chunk) + kv) + proposing
    proposing          a * calls and passes + b * nodes

``p`` and ``v`` are ratios of observed to predicted seconds, for each batch size separately, because
what the curve leaves out (sampling, reading KV, Python) grows with the batch. ``v`` is learned from
steps that verify, so the overhead of verification needs no model. ``kv`` is the time for reading
KV, which is the same either way.

Recorded steps have the same number of rows for every sequence, whatever the nodes of each. Then
``rows`` tells how many are computed, and takes the place of B + n in the curve.

StepTimeFilter estimates ``p`` and ``v`` with a Kalman filter of two states (Kalman, "A New Approach
to Linear Filtering and Prediction Problems", 1960):

    log(observed / predicted) of a plain step        = s + noise
                              of a speculative step  = s + r + noise

The machine's speed ``s`` changes quickly and affects both kinds; the extra time of speculative
steps, ``r``, hardly changes. So each kind informs the other, and their comparison stays valid on a
machine whose speed varies. Outliers are cut: an innovation counts at most OUTLIER_CUT standard
deviations. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.speculation.control.draft_lengths import StepOutcome
from engine.speculation.control.latency_curve import LatencyCurve
from protocol.performance.draft_choice import Vector
from protocol.performance.step_model import StepModel

DRIFT_S = 0.03**2  # variance that one step adds to the estimate of ``s``
DRIFT_R = 0.004**2  # variance that one step adds to the estimate of ``r``
NOISE = 0.1**2  # initial variance of the noise
LEAST_NOISE = 0.02**2  # minimum variance of the noise
FOLLOW = 1.0 / 32  # weight of one step in the variance of the noise

OUTLIER_CUT = 2.5

MIN_STEPS = 9  # plain steps before speculative steps can be compared with them
FIRST_TEXT_STEPS = 64.0  # steps of one text, before any was observed
KEEP = 1.0 - 1.0 / 16  # weight that earlier proposals keep when another one is observed


@dataclass
class StepTimeFilter:
    """Ratios of observed to predicted step time at one batch size."""

    s: float = 0.0
    r: float = 0.0
    ss: float = 1.0  # covariance
    sr: float = 0.0
    rr: float = 0.2**2
    noise: float = NOISE
    steps: int = 0

    @property
    def ready(self) -> bool:
        """Whether there are enough plain steps to compare with."""
        return self.steps >= MIN_STEPS

    @property
    def plain(self) -> float:
        """Observed over predicted seconds of a plain step."""
        return math.exp(self.s)

    @property
    def verify(self) -> float:
        """Observed over predicted seconds of a pass with drafts, never less than ``plain``."""
        return math.exp(self.s + max(0.0, self.r))

    @property
    def error(self) -> float:
        """Relative standard error of ``verify`` / ``plain``."""
        return math.sqrt(self.rr)

    def observe(self, ratio: float, *, verified: bool) -> None:
        """Update with observed over predicted seconds of a speculative or of a plain step."""
        of_r = float(verified)
        error = math.log(ratio) - self.s - of_r * self.r
        self.steps += 1
        self.ss += DRIFT_S
        self.rr += DRIFT_R
        with_s, with_r = self.ss + of_r * self.sr, self.sr + of_r * self.rr
        known = with_s + of_r * with_r
        most = OUTLIER_CUT * math.sqrt(known + self.noise)
        error = min(max(error, -most), most)
        self.noise += FOLLOW * (max(LEAST_NOISE, error * error - known) - self.noise)
        gain_s, gain_r = with_s / (known + self.noise), with_r / (known + self.noise)
        self.s += gain_s * error
        self.r += gain_r * error
        self.ss -= gain_s * with_s
        self.sr -= gain_s * with_r
        self.rr -= gain_r * with_r

    def for_new_batch_size(self) -> StepTimeFilter:
        """Return a filter for a new batch size with the same ratios and more uncertainty."""
        noise = max(self.noise, NOISE)
        ss, rr = self.ss + 0.1**2, self.rr + 0.05**2
        return StepTimeFilter(self.s, self.r, ss, self.sr, rr, noise, self.steps)


@dataclass
class ProposalCost:
    """Seconds of proposing, fitted as a * x + b * nodes by least squares with forgetting. x is the
    number of passes, at least one. The fit minimizes relative errors, so a slow first call has
    little weight."""

    per_pass: float = 0.0
    per_node: float = 0.0
    _xx: float = 0.0
    _xn: float = 0.0
    _nn: float = 0.0
    _xy: float = 0.0
    _ny: float = 0.0

    def observe(self, passes: int, nodes: int, seconds: float) -> None:
        seconds = max(seconds, 1e-7)
        x, n, keep = max(1, passes) / seconds, nodes / seconds, KEEP
        self._xx = keep * self._xx + x * x
        self._xn = keep * self._xn + x * n
        self._nn = keep * self._nn + n * n
        self._xy = keep * self._xy + x
        self._ny = keep * self._ny + n
        # Two non-negative costs; collinear observations are attributed to passes.
        nn = self._nn + 1e-3 * self._xx
        det = self._xx * nn - self._xn * self._xn
        self.per_node = max(0.0, (self._xx * self._ny - self._xn * self._xy) / det)
        self.per_pass = (self._xy - self._xn * self.per_node) / self._xx
        if self.per_pass < 0.0:
            self.per_pass, self.per_node = 0.0, self._ny / nn


@dataclass
class CatchUpCost:
    """Seconds of catching up with recent texts, spread over the steps that get drafts. Where long
    prompts precede short outputs, drafts may not pay because of it."""

    _seconds: float = 0.0
    _steps: float = FIRST_TEXT_STEPS

    def observe(self, sequences: int, seconds: float) -> None:
        """Add a step in which drafts were requested for ``sequences``."""
        if seconds > 0.0:
            self._seconds = KEEP * self._seconds + seconds
            self._steps *= KEEP
        self._steps += sequences

    @property
    def is_free(self) -> bool:
        """Whether drafts were requested, and no text had to be caught up with."""
        return self._seconds == 0.0 and self._steps > FIRST_TEXT_STEPS

    @property
    def per_sequence(self) -> float:
        """Seconds for each sequence and step."""
        return self._seconds / self._steps


@dataclass
class StepCostModel:
    """Predicts the seconds of the steps of one engine; its Controller owns it. ``fitted`` returns
    the engine's step time model, which knows what reading KV costs. ``rows`` returns the rows that
    a step computes, by its sequences, the most nodes of one, and the tokens of all contexts; None:
    there are as many as sequences and nodes."""

    curve: LatencyCurve
    fitted: Callable[[], StepModel | None] = lambda: None
    rows: Callable[[int, int, int], int] | None = None
    proposing: ProposalCost = field(default_factory=ProposalCost)
    catching_up: CatchUpCost = field(default_factory=CatchUpCost)
    _filters: dict[int, StepTimeFilter] = field(default_factory=dict)
    _last: StepTimeFilter | None = None

    def filter(self, batch: int) -> StepTimeFilter:
        """Return the filter of this batch size; a new one starts from the last one used."""
        size = (batch - 1).bit_length()
        found = self._filters.get(size)
        if found is None:
            last = self._last
            found = StepTimeFilter() if last is None else last.for_new_batch_size()
            self._filters[size] = found
        self._last = found
        return found

    def predicted(self, rows: int, kv_tokens: int) -> float:
        """Return the seconds of the model's pass, before any was observed."""
        fitted = self.fitted()
        return self.curve(rows) + (0.0 if fitted is None else fitted.kv_token * kv_tokens)

    def plain(self, batch: int, kv_tokens: int) -> float:
        """Return the seconds of a plain step."""
        return self.filter(batch).plain * self.predicted(batch, kv_tokens)

    def overhead(self, batch: int, kv_tokens: int) -> float:
        """Return the seconds of verifying at all, beyond those of a plain step by the model that
        the engine reports, to which others add them. That model is fitted to steps with drafts as
        well, so that it contains some of them where the engine drafts; and what a line leaves out
        at this batch counts here."""
        verify, fitted = self.filter(batch).verify * self.predicted(batch, kv_tokens), self.fitted()
        if fitted is None:
            return max(0.0, verify - self.plain(batch, kv_tokens))
        return max(0.0, verify - fitted.decode_s(batch, kv_tokens))

    def verify(self, batch: int, nodes: int, chunk_tokens: int, kv_tokens: int) -> Vector:
        """Return the seconds [nodes + 1] of the model's pass with 0 .. nodes. The time of a prefill
        chunk in the same step is not attributed to the nodes, but nodes cost more beside it where
        rows cost more."""
        span = self.curve.span(batch + chunk_tokens, batch + chunk_tokens + nodes)
        base = self.predicted(batch, kv_tokens)
        seconds: Vector = self.filter(batch).verify * (span - span[0] + base)
        return seconds

    def padded(self, batch: int, most: int, kv_tokens: int) -> Vector | None:
        """Return the seconds [most + 1] of the model's pass with room for 0 .. most nodes of each
        sequence, in a step without chunks; None: its time depends on the nodes alone."""
        if self.rows is None:
            return None
        rows = [self.rows(batch, nodes, kv_tokens) for nodes in range(most + 1)]
        passes = np.array([self.predicted(count, kv_tokens) for count in rows])
        seconds: Vector = self.filter(batch).verify * passes
        return seconds

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step without chunks."""
        seconds = max(outcome.step_s - outcome.draft_s, 1e-7)
        ratio = seconds / self.predicted(self._rows(outcome), outcome.kv_tokens)
        self.filter(len(outcome.sequences)).observe(ratio, verified=bool(outcome.proposed))

    def _rows(self, outcome: StepOutcome) -> int:
        """Return the rows that the model's pass has computed for sequences and nodes."""
        batch, nodes = len(outcome.sequences), sum(outcome.proposed)
        if self.rows is None or not nodes or outcome.chunked:
            return batch + nodes
        return self.rows(batch, max(outcome.proposed), outcome.kv_tokens)

    def extra_seconds(self, outcome: StepOutcome, plain: float) -> float:
        """Return the seconds of a step with drafts beyond those of a ``plain`` step. This is the
        prediction, or the measured excess where that is larger, up to ``plain`` more than
        predicted. A single step that took hardly longer is no measurement."""
        verify = self.filter(len(outcome.sequences)).verify
        verify *= self.predicted(self._rows(outcome), outcome.kv_tokens)
        more = max(0.0, verify - plain + outcome.draft_s)
        if outcome.proposed and not outcome.chunked:
            more = max(more, min(outcome.step_s - plain, more + plain))
        return more
