"""What steps cost, plain and speculating: the calibrated curve, followed by what steps took.

    plain step         p * (curve(B) + kv)
    speculating step   v * (curve(B) + curve(B + n + chunk) - curve(B + chunk) + kv) + proposing
    proposing          a * calls and passes + b * nodes

``p`` and ``v`` are observed/predicted, for each size of the batch apart, because what the curve
leaves out (drawing, reading KV, Python) grows with the batch. As ``v`` is learned from steps that
verify, the overhead of verification needs no model. ``kv``: reading KV costs the same either way.
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.scheduling.step_time import Coefficients
from engine.speculation.control.draft_choice import LatencyCurve, Vector, linear_curve
from engine.speculation.control.draft_lengths import StepOutcome

# MERGED engine.speculation.pace
# How long steps take against what was predicted, plain and speculating ones. Torch-free.
#
#     log(observed / predicted) of a plain step       = s + noise
#                               of a speculating one  = s + r + noise
#
# A Kalman filter of two states. The machine's speed ``s`` moves quickly, and with it both kinds;
# how
# much longer speculating steps take, ``r``, hardly moves. So what is seen of one kind tells about
# the
# other, and the comparison survives a machine that is now slow, now fast (Kalman, "A New Approach
# to
# Linear Filtering and Prediction Problems", 1960). Steps that stumble are cut: an innovation counts
# at most CUT of its standard deviations.

DRIFT_S = 0.03**2
"""Variance that a step adds to what is known of ``s`` ..."""

DRIFT_R = 0.004**2
"""... and of ``r``."""

NOISE = 0.1**2
"""Variance of the noise as long as little is known of it, and ..."""

LEAST_NOISE = 0.02**2
"""... at least."""

FOLLOW = 1.0 / 32
"""Weight of a step in the noise that is known."""

OUTLIER_CUT = 2.5

MIN_STEPS = 9
"""Plain steps before which nothing is compared with them."""


@dataclass
class StepTimeFilter:
    """At one size of the batch."""

    s: float = 0.0
    r: float = 0.0
    ss: float = 1.0  # covariance
    sr: float = 0.0
    rr: float = 0.2**2
    noise: float = NOISE
    steps: int = 0

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return self.steps >= MIN_STEPS

    @property
    def plain(self) -> float:
        """Observed over predicted seconds."""
        return math.exp(self.s)

    @property
    def verify(self) -> float:
        """The same; no pass with nodes is quicker than a plain one."""
        return math.exp(self.s + max(0.0, self.r))

    @property
    def error(self) -> float:
        """Standard error of ``verify`` / ``plain``, as a share."""
        return math.sqrt(self.rr)

    def saw_plain(self, ratio: float) -> None:
        """Observed over predicted seconds of a plain step."""
        self._saw(math.log(ratio) - self.s, of_r=0.0)

    def saw_verify(self, ratio: float) -> None:
        """The same of a speculating one."""
        self._saw(math.log(ratio) - self.s - self.r, of_r=1.0)

    def _saw(self, error: float, of_r: float) -> None:
        """An innovation of ``s + of_r * r``."""
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

    def another(self) -> StepTimeFilter:
        """For a size of the batch that is new: guessed to be alike."""
        noise = max(self.noise, NOISE)
        return StepTimeFilter(
            self.s, self.r, self.ss + 0.1**2, self.sr, self.rr + 0.05**2, noise, self.steps
        )


KEEP = 1.0 - 1.0 / 16
"""Weight of what is known of proposing when it is done again."""


@dataclass
class ProposalCost:
    """Seconds of proposing: a * x + b * nodes by least squares with forgetting, for relative errors
    (a slow first call counts little); x is the number of passes, and one where there is none."""

    a_pass: float = 0.0
    row: float = 0.0
    calls: int = 0
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
        self.calls += 1
        self._solve()

    def _solve(self) -> None:
        """Neither is negative; where the two cannot be told apart, it is the passes."""
        nn = self._nn + 1e-3 * self._xx
        det = self._xx * nn - self._xn * self._xn
        self.row = max(0.0, (self._xx * self._ny - self._xn * self._xy) / det)
        self.a_pass = (self._xy - self._xn * self.row) / self._xx
        if self.a_pass < 0.0:
            self.a_pass, self.row = 0.0, self._ny / nn


@dataclass
class CatchUpCost:
    """Seconds of catching up with texts, spread over the steps in which they are proposed to: of
    the last texts. Where texts are short, and long ones stand before them, drafts may not pay."""

    _seconds: float = 0.0
    _steps: float = 64.0  # of a text, before anything is known

    def observe(self, sequences: int, seconds: float) -> None:
        """A step in which so many sequences were to be proposed to."""
        if seconds > 0.0:
            self._seconds = KEEP * self._seconds + seconds
            self._steps *= KEEP
        self._steps += sequences

    @property
    def a_step(self) -> float:
        """Of one sequence."""
        return self._seconds / self._steps


@dataclass
class StepCostModel:
    """``curve``: calibrated; None: the line of ``known``, the fitted model of the step's duration,
    as long as there is one, and no curve at all before."""

    calibrated: LatencyCurve | None
    known: Callable[[], Coefficients | None] = lambda: None
    proposing: ProposalCost = field(default_factory=ProposalCost)
    catching_up: CatchUpCost = field(default_factory=CatchUpCost)
    _paces: dict[int, StepTimeFilter] = field(default_factory=dict)
    _last: StepTimeFilter | None = None

    def curve(self) -> LatencyCurve | None:
        if self.calibrated is not None:
            return self.calibrated
        known = self.known()
        return linear_curve(known, 64) if known is not None and known.step > 0 else None

    def pace(self, batch: int) -> StepTimeFilter:
        """At this size of the batch; one that is new begins as the last."""
        size = (batch - 1).bit_length()
        pace = self._paces.get(size)
        if pace is None:
            last = self._last
            pace = self._paces[size] = StepTimeFilter() if last is None else last.another()
        self._last = pace
        return pace

    def kv_seconds(self, kv_tokens: int) -> float:
        """Of reading them."""
        known = self.known()
        return 0.0 if known is None else known.kv_token * kv_tokens

    def plain(self, curve: LatencyCurve, batch: int, kv_tokens: int) -> float:
        """Of a plain step."""
        return self.pace(batch).plain * (curve(batch) + self.kv_seconds(kv_tokens))

    def verify(
        self, curve: LatencyCurve, batch: int, nodes: int, chunk_tokens: int, kv_tokens: int
    ) -> Vector:
        """[nodes + 1] of the model's pass with 0 .. nodes. What a chunk beside it takes counts for
        the prompts, not for the nodes; they cost more beside it, where rows cost more."""
        span = curve.span(batch + chunk_tokens, batch + chunk_tokens + nodes)
        base = curve(batch) + self.kv_seconds(kv_tokens)
        seconds: Vector = self.pace(batch).verify * (span - span[0] + base)
        return seconds

    def observe(self, batch: int, rows: int, kv_tokens: int, step_s: float, draft_s: float) -> None:
        """A step without chunks: ``rows`` is the batch, or more where nodes were verified."""
        curve = self.curve()
        if curve is None:
            return
        ratio = max(step_s - draft_s, 1e-7) / (curve(rows) + self.kv_seconds(kv_tokens))
        if rows == batch:
            self.pace(batch).saw_plain(ratio)
        else:
            self.pace(batch).saw_verify(ratio)

    def more(self, curve: LatencyCurve, outcome: StepOutcome, plain: float) -> float:
        """Seconds that a step with drafts took beyond ``plain``: as predicted; more where it took
        more, within reason. One of one step is no measurement where it takes hardly any more."""
        batch, nodes = len(outcome.sequences), sum(outcome.proposed)
        verify = float(self.verify(curve, batch, nodes, 0, outcome.kv_tokens)[-1])
        more = max(0.0, verify - plain + outcome.draft_s)
        if nodes and not outcome.chunked:
            more = max(more, min(outcome.step_s - plain, more + plain))
        return more
