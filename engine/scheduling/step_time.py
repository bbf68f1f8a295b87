"""The step-time model: predicts how long a step takes, fitted to the steps that ran.

    seconds = c0 + c1*decode_rows + c2*decode_kv_tokens + c3*u + c4*u*(m + u/2)

with ``u`` new prompt tokens of a chunk after ``m`` computed ones, summed over the chunks.

The fit is recursive least squares in information form. With A, what is known of the coefficients c,
new steps x that took y lead to the c >= 0 that minimise

    (c - last c)^T A' (c - last c) + sum (y - x^T c)^2        A' = D A D, D diagonal

and A' + sum x x^T is known then. A coefficient's part of D is below 1 only for steps that have its
feature, so hours of pure decoding leave what is known of prefill unchanged (Vahidi, Stefanopoulou
and Peng, "Recursive least squares with forgetting for online estimation of vehicle mass and road
grade", Vehicle System Dynamics 43, 2005). Each step is weighted by its relative error, so long
steps do not dominate short ones.

Short prompts say little of c4, which decides how long a prompt of 100,000 tokens takes: what chance
makes of it may be five times too much. So where steps do not tell, c4 is c3 times the FLOPs of a
pair over those of a row: a normal prior of c4 / c3, as in Bayesian linear regression.

Engines that share cores slow each other, by one factor whatever a step computes. On a CPU a step
is measured twice: by the time of the processor, which the fit explains, and by the clock. Their
ratio in recent steps is the slowdown, and ``coefficients`` are those of the fit times the slowdown.
On a GPU there is none.

Small steps say little of large ones: a device takes as long for one row as for many until computing
them takes longer than reading the weights. So an engine measures its largest steps when it starts.
They are ``remembered``: part of what is known of the coefficients for good.

A step now and then takes several times as long as usual, and a mean would follow these. So a step
differs from its prediction by MOST_SURPRISE at most, and by more only as far as the prediction is
uncertain (Huber, "Robust estimation of a location parameter", 1964). The first MIN_OBSERVATIONS
steps, of which there is no prediction to speak of, count by their own durations.

Each engine has one ``StepTimeModel``. The stepper feeds it through ``StepTimer``; the step policy
and the speculation controller read its coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from protocol.performance.step_model import StepModel, StepWork

Vector: TypeAlias = NDArray[np.float64]
Seen: TypeAlias = tuple[float, float, float]

FORGETTING_FACTOR = 0.98
"""Weight of earlier steps when a new one with the same features arrives: a memory of about 50."""

MOST_SURPRISE = 0.25
"""Largest relative error of a step whose prediction is certain. Of 0.15 to 0.5, and of forgetting
factors of 0.97 to 0.995, these predicted the steps of four engines on two cores among the best."""

SLOWDOWN_WEIGHT = 0.1
"""Of a step in the logarithm of the slowdown."""

MIN_OBSERVATIONS = 16
"""Steps until the model is used for predictions."""

FIT_EVERY = 4
"""Steps between two fits, after MIN_OBSERVATIONS steps."""

LEAST_INFORMATION = 1e-9
"""Of each coefficient, as a share of the mean, so that A can be inverted."""

PAIR_INFORMATION = 0.003
"""Of the prior of c4, in steps whose time is all of pairs. Steps differ from their predictions by
some 5%, and c4 may be half or twice what the FLOPs say."""

MIN_PAIR_S = 1e-30
"""Of c4, so that its square is a number."""

MOST_TOO_SHORT = 4.0
"""Times that one of the first steps is shorter than predicted and counts by its own duration."""

REMEMBERED_STEPS = 2.0
"""Recent steps that a remembered one counts for; about 50 count. With more of them, small batches
on a device that takes as long for one row as for many make large ones less too short; with fewer,
it is sooner believed that a machine has become slower."""

MIN_STEP_S = 1e-5
"""Shorter durations measure the clock rather than the step."""

SEEN_MEMORY_S = 600.0
"""Decay constant, in seconds of steps, of the largest steps that were seen."""

LEAST_SEEN = (16.0, 32768.0, 256.0)
"""Decode rows, KV tokens and prompt tokens of a step that count as seen in any case: no kernel is
faster for fewer rows."""

_KEEP = math.sqrt(FORGETTING_FACTOR)  # of a feature: A has its square
_SIZES = np.array([1.0, 8.0, 4096.0, 256.0, 65536.0])  # [5] typical features, for scaling


class StepTimeModel:
    """The fitted model of one engine; ``observe`` is called after every step.

    ``pair_rows``: FLOPs of a pair of query and key, as a share of a row's; 0: they are not known.
    """

    def __init__(self, pair_rows: float = 0.0) -> None:
        self._pair_rows = pair_rows
        self.reset()

    def reset(self) -> None:
        """Forget all observations."""
        self.steps = 0
        self.coefficients = StepModel(0.0, 0.0, 0.0, 0.0, 0.0)
        self.slowdown = 1.0  # seconds on the clock for each one of the processor
        self._alone = self.coefficients  # without the slowdown
        self._scaled = np.zeros(5)  # c, for scaled features
        self._information = np.zeros((5, 5))  # A, likewise
        self._uncertainty = np.zeros((5, 5))  # its inverse
        self._clear_new()
        self._seen = self._least_seen = LEAST_SEEN  # per step
        self._remembered = np.zeros((5, 5))  # sum of x x^T of the steps that are never forgotten
        self._remembered_evidence = np.zeros(5)
        self._measured: list[tuple[float, StepWork]] | None = None  # seconds; None: not remembered

    def _clear_new(self) -> None:
        """Forget the steps since the last fit."""
        self._new_information = np.zeros((5, 5))  # sum of x x^T
        self._new_evidence = np.zeros(5)  # sum of x y
        self._decay = np.ones(5)  # D

    @property
    def known(self) -> StepModel | None:
        """The coefficients, or None before MIN_OBSERVATIONS steps."""
        return self.coefficients if self.steps >= MIN_OBSERVATIONS else None

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Never forget the steps that are observed meanwhile, which have about the same work: the
        one whose duration is the median counts for REMEMBERED_STEPS, and the others for nothing."""
        self._measured = measured = list[tuple[float, StepWork]]()
        try:
            yield
        finally:
            self._measured = None
        if measured:
            seconds, work = sorted(measured)[len(measured) // 2]
            x = np.array((1, *work)) / (_SIZES * seconds)
            self._remembered += REMEMBERED_STEPS * np.multiply.outer(x, x)
            self._remembered_evidence += REMEMBERED_STEPS * x
            for _, work in measured:
                self._least_seen = _larger(self._least_seen, work)
            if self.steps:
                self._fit()

    def observe(
        self, work: StepWork, seconds: float, steps: int = 1, *, waited_s: float = 0.0
    ) -> None:
        """Add a measurement: ``steps`` steps with ``work`` in total took ``seconds``, of which the
        engine waited ``waited_s`` for a core. Steps that were measured only as a sum fit as well,
        because the model is linear."""
        taken = max(seconds, MIN_STEP_S)
        seconds = expected = max(taken - waited_s, MIN_STEP_S)
        if self._measured is not None:
            if steps == 1:
                self._measured.append((seconds, work))
            return
        slower = taken / seconds / self.slowdown
        slower = min(max(slower, 1.0 - MOST_SURPRISE), 1.0 + MOST_SURPRISE)
        self.slowdown *= slower**SLOWDOWN_WEIGHT
        if self.steps:
            last = self._alone
            expected = max(MIN_STEP_S, last.step * steps + last.added_seconds(work))
        if self.steps < MIN_OBSERVATIONS:
            # The first fits may predict next to nothing, by which no step must be weighted.
            expected = max(seconds, expected / MOST_TOO_SHORT)
        # Relative error: features and duration are divided by the expected duration.
        x = np.array((steps, *work)) / (_SIZES * expected)
        uncertainty = max(0.0, float(x @ self._uncertainty @ x))  # squared, of the prediction
        most = MOST_SURPRISE * math.sqrt(1.0 + uncertainty)
        ratio = min(max(seconds / expected, 1.0 - most), 1.0 + most)
        self._new_information += np.multiply.outer(x, x)
        self._new_evidence += x * ratio
        self._decay[x > 0] *= _KEEP
        keep = math.exp(-seconds / SEEN_MEMORY_S)
        self._seen = _larger([keep * size for size in self._seen], [n / steps for n in work])
        self.steps += 1
        if self.steps < MIN_OBSERVATIONS or self.steps % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        known = self._information * np.multiply.outer(self._decay, self._decay)
        evidence = known @ self._scaled + self._new_evidence
        known += self._new_information
        least = LEAST_INFORMATION * known.trace() / len(known) * np.eye(len(known))
        whole = known + least + self._pair_prior(known.trace())
        self._scaled = _solve_non_negative(whole, evidence + least @ self._scaled)
        self._information = known
        self._clear_new()
        # What is remembered counts once, and not once more with each fit.
        evidence = whole @ self._scaled + self._remembered_evidence
        whole += self._remembered
        self._uncertainty = np.linalg.inv(whole)
        alone = _solve_non_negative(whole, evidence) / _SIZES
        seen = list(_larger(self._seen, self._least_seen))
        self._alone = StepModel(*alone.tolist(), *seen)
        self.coefficients = StepModel(*(self.slowdown * alone).tolist(), *seen)

    def _pair_prior(self, most: float) -> Vector:
        """Return the information [5, 5] that c4 is pair_rows * c3, relative to the larger of both,
        so that half and twice as much are about as likely. It is of the model, not of any step, and
        so is never forgotten. ``most``: the trace of what steps have told, which it does not
        exceed, so that their sum can be inverted where prompts take next to no time."""
        _, _, _, token_s, pair_s = self._scaled / _SIZES
        expected_s = self._pair_rows * token_s
        if expected_s <= 0:
            return np.zeros((5, 5))
        difference = np.array((0.0, 0.0, 0.0, -self._pair_rows, 1.0)) / _SIZES
        squared = float(difference @ difference)
        information = PAIR_INFORMATION * squared / max(expected_s, pair_s, MIN_PAIR_S) ** 2
        prior: Vector = min(information, most) / squared * np.multiply.outer(difference, difference)
        return prior


class StepTimer:
    """Measures steps for a model. On a GPU a step that draws no token returns before it has been
    computed; its work is measured together with that of the next step that draws one.

    ``core_clock`` returns the seconds that this thread has had a core; None: it needs none."""

    def __init__(
        self,
        model: StepTimeModel,
        clock: Callable[[], float],
        core_clock: Callable[[], float] | None = None,
    ) -> None:
        self._model = model
        self._clock = clock
        self._core_clock = core_clock
        self._began = self._ended = 0.0
        self._core_began = 0.0
        self._work = StepWork()
        self._steps = 0  # steps that have begun and are not known to be computed

    def begin(self, *, ahead: bool = False) -> None:
        """Start to measure a step; one that was launched ``ahead`` began at the last one's end."""
        if not self._steps:
            self._began = self._ended if ahead else self._clock()
            if self._core_clock is not None:
                self._core_began = self._core_clock()
            self._work = StepWork()
        self._steps += 1

    def end(self, work: StepWork, *, done: bool, before_s: float = 0.0) -> None:
        """Record the ``work`` of the step that began last. ``done`` says that the device has
        finished it, so that the time can be measured. ``before_s``: for so long it computed drafts
        first, which the costs of proposing have."""
        self._work = self._work.plus(work)
        if done:
            self._ended = self._clock()
            seconds, waited_s = self._ended - self._began - before_s, 0.0
            if self._core_clock is not None:
                waited_s = max(0.0, seconds - (self._core_clock() - self._core_began))
            self._model.observe(self._work, seconds, self._steps, waited_s=waited_s)
            self._steps = 0

    def idle(self) -> None:
        """Discard the steps that are not known to be computed: the engine has nothing to run."""
        self._steps = 0


def _larger(seen: Sequence[float], work: Sequence[float]) -> Seen:
    """Return the larger rows, KV tokens and prompt tokens."""
    return max(seen[0], work[0]), max(seen[1], work[1]), max(seen[2], work[2])


def _solve_non_negative(a: Vector, b: Vector) -> Vector:
    """Return the minimum [n] of x^T a x / 2 - b^T x over x >= 0 for a [n, n] and b [n], by active
    sets (Lawson and Hanson, Solving Least Squares Problems, chapter 23), starting from the
    unconstrained solution: negative variables are fixed at zero and released when that helps."""
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
