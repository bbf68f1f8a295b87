"""How long steps take against what was predicted, plain and speculating ones. Torch-free.

    log(observed / predicted) of a plain step       = s + noise
                              of a speculating one  = s + r + noise

A Kalman filter of two states. The machine's speed ``s`` moves quickly, and with it both kinds; how
much longer speculating steps take, ``r``, hardly moves. So what is seen of one kind tells about the
other, and the comparison survives a machine that is now slow, now fast (Kalman, "A New Approach to
Linear Filtering and Prediction Problems", 1960). Steps that stumble are cut: an innovation counts
at most CUT of its standard deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

CUT = 2.5

BEGIN = 9
"""Plain steps before which nothing is compared with them."""


@dataclass
class Pace:
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
        return self.steps >= BEGIN

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
        most = CUT * math.sqrt(known + self.noise)
        error = min(max(error, -most), most)
        self.noise += FOLLOW * (max(LEAST_NOISE, error * error - known) - self.noise)
        gain_s, gain_r = with_s / (known + self.noise), with_r / (known + self.noise)
        self.s += gain_s * error
        self.r += gain_r * error
        self.ss -= gain_s * with_s
        self.sr -= gain_s * with_r
        self.rr -= gain_r * with_r

    def another(self) -> Pace:
        """For a size of the batch that is new: guessed to be alike."""
        noise = max(self.noise, NOISE)
        return Pace(self.s, self.r, self.ss + 0.1**2, self.sr, self.rr + 0.05**2, noise, self.steps)
