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

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.speculation.choice import Vector
from engine.speculation.curve import Curve, linear
from engine.speculation.lengths import Outcome
from engine.speculation.pace import Pace
from engine.step_time import Coefficients

FORGET = 1.0 - 1.0 / 16
"""Weight of what is known of proposing when it is done again."""


@dataclass
class Proposing:
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
        x, n, keep = max(1, passes) / seconds, nodes / seconds, FORGET
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
class CatchingUp:
    """Seconds of catching up with texts, spread over the steps in which they are proposed to: of
    the last texts. Where texts are short, and long ones stand before them, drafts may not pay."""

    _seconds: float = 0.0
    _steps: float = 64.0  # of a text, before anything is known

    def observe(self, sequences: int, seconds: float) -> None:
        """A step in which so many sequences were to be proposed to."""
        if seconds > 0.0:
            self._seconds = FORGET * self._seconds + seconds
            self._steps *= FORGET
        self._steps += sequences

    @property
    def a_step(self) -> float:
        """Of one sequence."""
        return self._seconds / self._steps


@dataclass
class Costs:
    """``curve``: calibrated; None: the line of ``known``, the fitted model of the step's duration,
    as long as there is one, and no curve at all before."""

    calibrated: Curve | None
    known: Callable[[], Coefficients | None] = lambda: None
    proposing: Proposing = field(default_factory=Proposing)
    catching_up: CatchingUp = field(default_factory=CatchingUp)
    _paces: dict[int, Pace] = field(default_factory=dict)
    _last: Pace | None = None

    def curve(self) -> Curve | None:
        if self.calibrated is not None:
            return self.calibrated
        known = self.known()
        return linear(known, 64) if known is not None and known.step > 0 else None

    def pace(self, batch: int) -> Pace:
        """At this size of the batch; one that is new begins as the last."""
        size = (batch - 1).bit_length()
        pace = self._paces.get(size)
        if pace is None:
            last = self._last
            pace = self._paces[size] = Pace() if last is None else last.another()
        self._last = pace
        return pace

    def kv_seconds(self, kv_tokens: int) -> float:
        """Of reading them."""
        known = self.known()
        return 0.0 if known is None else known.kv_token * kv_tokens

    def plain(self, curve: Curve, batch: int, kv_tokens: int) -> float:
        """Of a plain step."""
        return self.pace(batch).plain * (curve(batch) + self.kv_seconds(kv_tokens))

    def verify(
        self, curve: Curve, batch: int, nodes: int, chunk_tokens: int, kv_tokens: int
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

    def more(self, curve: Curve, outcome: Outcome, plain: float) -> float:
        """Seconds that a step with drafts took beyond ``plain``: as predicted; more where it took
        more, within reason. One of one step is no measurement where it takes hardly any more."""
        batch, nodes = len(outcome.sequences), sum(outcome.proposed)
        verify = float(self.verify(curve, batch, nodes, 0, outcome.kv_tokens)[-1])
        more = max(0.0, verify - plain + outcome.draft_s)
        if nodes and not outcome.chunked:
            more = max(more, min(outcome.step_s - plain, more + plain))
        return more
