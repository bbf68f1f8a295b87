"""How long a step takes, learnt from the steps that ran. Torch-free.

    seconds = c0 + c1*decode_rows + c2*decode_kv_tokens + c3*u + c4*u*(m + u/2)

with ``u`` new prompt tokens of a chunk after ``m`` computed ones, summed over the chunks.

Recursive least squares with forgetting, in information form: A = sum of forget^age x x^T, and b of
x y. The coefficients are the c >= 0 that minimise c^T A c / 2 - b^T c + anchor |c - last c|^2 / 2:
where recent steps bring no news the anchor holds what was known, so that hours of pure decoding
leave prefill as it was (Gunnarsson, "Combining tracking and regularization in recursive least
squares identification", CDC 1996). Each step counts by its relative error: the long ones do not
drown the short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]

FORGET = 0.98
"""Weight of what is known when a step comes: memory is some 50 steps."""

ANCHOR = 0.3
"""Steps that the last coefficients count as much as, in every direction, at each fit."""

OUTLIER = 3.0
"""A step is taken to have lasted at most so many times what was predicted ..."""

SETTLED = 16
"""... once so many steps have been seen."""

FIT_EVERY = 4
"""Steps between two fits, once settled."""

FOLLOW = 0.1
"""Weight of a step's features in their mean size, which is the unit of the anchor."""

SHORTEST_S = 1e-5
"""Below this, clocks and not steps are measured."""

_SIZES = np.array([1.0, 8.0, 4096.0, 256.0, 65536.0])  # a first guess at what the features are


class Work(NamedTuple):
    """What a step has to do; sums of the model above."""

    decode_rows: int = 0
    decode_kv_tokens: int = 0  # tokens attended to by them
    prompt_tokens: int = 0  # u
    prompt_pairs: float = 0.0  # u * (m + u/2): pairs of query and key

    def plus(self, other: Work) -> Work:
        return Work(
            self.decode_rows + other.decode_rows,
            self.decode_kv_tokens + other.decode_kv_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.prompt_pairs + other.prompt_pairs,
        )


class Coefficients(NamedTuple):
    """c0 .. c4 in seconds; none is negative."""

    step: float
    row: float
    kv_token: float
    prompt_token: float
    prompt_pair: float

    def seconds(self, work: Work) -> float:
        """Predicted duration of a step."""
        return self.step + self.added_seconds(work)

    def added_seconds(self, work: Work) -> float:
        """What ``work`` adds to a step that takes place anyhow."""
        return (
            self.row * work.decode_rows
            + self.kv_token * work.decode_kv_tokens
            + self.prompt_token * work.prompt_tokens
            + self.prompt_pair * work.prompt_pairs
        )

    def prompt_tokens_within(self, seconds: float, computed: int) -> float:
        """Tokens of a prompt, after ``computed`` ones, that add at most ``seconds`` to a step: the
        root of c4/2 u^2 + (c3 + c4 m) u = seconds. Infinite where tokens cost nothing."""
        if seconds <= 0:
            return 0.0
        slope = self.prompt_token + self.prompt_pair * computed
        root = math.sqrt(slope * slope + 2.0 * self.prompt_pair * seconds)
        return 2.0 * seconds / (slope + root) if root > 0 else math.inf


class StepTimeModel:
    """The fit. One for each engine; ``observe`` after every step."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing, as at the start."""
        self.steps = 0
        self.coefficients = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)
        self._information = np.zeros((5, 5))  # A, of scaled features
        self._evidence = np.zeros(5)  # b
        self._sizes = np.zeros(5)  # mean of x x over the steps that have the feature

    @property
    def known(self) -> Coefficients | None:
        """``coefficients``, or None as long as they rest on too little."""
        return self.coefficients if self.steps >= SETTLED else None

    def observe(self, work: Work, seconds: float, steps: int = 1) -> None:
        """``work`` took ``seconds`` in ``steps`` steps (more than one where only their sum could be
        measured: the model is linear, so sums fit it as well)."""
        seconds = expected = max(seconds, SHORTEST_S)
        if self.steps >= SETTLED:
            last = self.coefficients
            expected = max(SHORTEST_S, last.step * steps + last.added_seconds(work))
            seconds = min(seconds, OUTLIER * expected)
        # Relative error: features and duration are divided by what was expected.
        x = np.array((steps, *work)) / (_SIZES * expected)
        self._information *= FORGET
        self._information += np.multiply.outer(x, x)
        self._evidence *= FORGET
        self._evidence += x * (seconds / expected)
        self._sizes += (x > 0) * (FOLLOW * (x * x - self._sizes))
        self.steps += 1
        if self.steps < SETTLED or self.steps % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        last = np.array(self.coefficients) * _SIZES
        anchor = ANCHOR * self._sizes + 1e-9 * self._sizes.max()
        scaled = _solve_non_negative(
            self._information + np.diag(anchor), self._evidence + anchor * last
        )
        self.coefficients = Coefficients(*(scaled / _SIZES).tolist())


class StepTimer:
    """Times steps for a model. On a GPU a step that draws no token returns before it is computed;
    its work counts together with that of the next one that does draw."""

    def __init__(self, model: StepTimeModel, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._began = 0.0
        self._work = Work()
        self._steps = 0  # under way or done, but not seen to be done

    def begin(self) -> None:
        if not self._steps:
            self._began = self._clock()
            self._work = Work()
        self._steps += 1

    def end(self, work: Work, *, done: bool) -> None:
        """The step that began last had ``work``; ``done``: it is known to be computed."""
        self._work = self._work.plus(work)
        if done:
            self._model.observe(self._work, self._clock() - self._began, self._steps)
            self._steps = 0

    def idle(self) -> None:
        """There is no step to run: what is not seen to be done by now never will be."""
        self._steps = 0


def _solve_non_negative(a: Vector, b: Vector) -> Vector:
    """The minimum of x^T a x / 2 - b^T x over x >= 0, by active sets (Lawson and Hanson, Solving
    Least Squares Problems, chapter 23, from the side of the unconstrained solution): variables that
    come out negative are set to zero, and let go again when that would help."""
    x: Vector = np.linalg.solve(a, b).astype(np.float64, copy=False)
    if x.min() >= 0:
        return x
    free = x > 0
    for _ in range(2 * len(b)):
        x = np.zeros_like(b)
        x[free] = np.linalg.solve(a[np.ix_(free, free)], b[free])
        if x.min() < 0:
            free[int(x.argmin())] = False
            continue
        gain = np.where(free, 0.0, b - a @ x)
        if gain.max() <= 1e-9 * abs(b).max():
            return x
        free[int(gain.argmax())] = True
    return x.clip(min=0.0)
