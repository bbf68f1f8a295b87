"""The linear model of a worker's step time, as workers fit and report it.

    seconds = step + row*decode_rows + kv_token*decode_kv_tokens
              + prompt_token*u + prompt_pair*u*(m + u/2)

for ``u`` prompt tokens computed after ``m`` tokens. A coefficient is zero where the worker has not
seen that kind of work: a decode worker may never have computed a prompt, and a prefill worker has
measured steps, but no decode row. Such a half is replaced by the mean of the other workers, so that
unknown work never looks free. Used by the cost function, the planner, the autoscaler's sizing and
the simulator.

A device takes as long for one row as for many until computing them takes longer than reading the
weights. A line that was fitted below that point is too low above it. So engines measure their
largest steps when they start, and a model says how large the steps were that it was fitted to. A
prediction is trusted up to TRUSTED_RATIO times that. From twice what was seen on, a step costs at
least as many times more as it is larger: what running it as several steps of a size that was seen
would take. In between the prediction rises to that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

DEFAULT_CHUNK = 512
"""Prompt tokens in a step, for a worker that does not report it."""

SHORT_PROMPT_SHARE = 8
"""A prompt of at most 1/n of a step's tokens is short: engines compute it beside longer ones."""

TRUSTED_RATIO = 1.5
"""Size of a step, over the largest that was seen, up to which the line is trusted."""

MAX_COEFFICIENT_S = 60.0
"""Reports with a larger coefficient are garbage."""

MAX_SEEN = 1e10
"""Rows or tokens of the largest step; reports of larger ones are garbage."""


class StepWork(NamedTuple):
    """The features of one step or of several, summed over its chunks."""

    decode_rows: int = 0
    decode_kv_tokens: int = 0  # tokens that the decode rows attend to
    prompt_tokens: int = 0  # u
    prompt_pairs: float = 0.0  # u * (m + u/2), pairs of a query and a key

    def plus(self, other: StepWork) -> StepWork:
        return StepWork(
            self.decode_rows + other.decode_rows,
            self.decode_kv_tokens + other.decode_kv_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.prompt_pairs + other.prompt_pairs,
        )


class StepModel(NamedTuple):
    """Coefficients in seconds, none negative, and the largest of the steps that they were fitted
    to. Without the latter, predictions of any size are trusted."""

    step: float
    row: float
    kv_token: float
    prompt_token: float
    prompt_pair: float
    rows_seen: float = math.inf
    kv_tokens_seen: float = math.inf  # that the rows of a step attended to
    prompt_tokens_seen: float = math.inf

    def decode_s(self, rows: float, kv_tokens: float) -> float:
        """Return the seconds of a step that decodes ``rows`` sequences over ``kv_tokens`` in
        all."""
        return self.constant_s(rows, kv_tokens) + self.row * rows + self.kv_token * kv_tokens

    def constant_s(self, rows: float, kv_tokens: float) -> float:
        """Return the part of ``decode_s`` that does not grow with the batch while that is
        trusted."""
        size = max(rows / self.rows_seen, kv_tokens / self.kv_tokens_seen)
        return self.step if size <= TRUSTED_RATIO else self.step * steps_for(size)

    def prompt_s(self, computed: int, tokens: int) -> float:
        """Return the seconds that ``tokens`` prompt tokens after ``computed`` ones add to steps."""
        pairs = tokens * (computed + tokens / 2)
        return self.prompt_token * tokens + self.prompt_pair * pairs

    def prefill_s(self, computed: int, tokens: int, chunk: int) -> float:
        """Return the seconds of a prompt on an idle worker, its steps included."""
        size = min(tokens, chunk) / self.prompt_tokens_seen
        step = self.step if size <= TRUSTED_RATIO else self.step * steps_for(size)
        return step * math.ceil(tokens / chunk) + self.prompt_s(computed, tokens)

    def seconds(self, work: StepWork) -> float:
        """Return the predicted duration of a step."""
        return self.step + self.added_seconds(work)

    def added_seconds(self, work: StepWork) -> float:
        """Return the seconds that ``work`` adds to a step that runs in any case."""
        return (
            self.row * work.decode_rows
            + self.kv_token * work.decode_kv_tokens
            + self.prompt_token * work.prompt_tokens
            + self.prompt_pair * work.prompt_pairs
        )

    def prompt_tokens_within(self, seconds: float, computed: int) -> float:
        """Return how many tokens of a prompt, after ``computed`` ones, add at most ``seconds`` to a
        step: the root of c4/2 u^2 + (c3 + c4 m) u = seconds, or infinity if tokens are free."""
        if seconds <= 0:
            return 0.0
        slope = self.prompt_token + self.prompt_pair * computed
        root = math.sqrt(slope * slope + 2.0 * self.prompt_pair * seconds)
        return 2.0 * seconds / (slope + root) if root > 0 else math.inf


def is_short_prompt(tokens: int, chunk: int) -> bool:
    """Return whether an engine computes a prompt, of which ``tokens`` are still to be computed, in
    its next step although older ones wait."""
    return tokens * SHORT_PROMPT_SHARE <= chunk


def steps_for(size: float) -> float:
    """Return how often a step's constant cost is counted in one that is ``size`` times as large as
    the largest that was seen: once while that is trusted, ``size`` times from twice as large on,
    without a jump in between."""
    return max(1.0, min(size, 2.0 * size - 2.0))


PRIOR_STEP_MODEL = StepModel(5e-3, 5e-5, 5e-8, 5e-5, 1e-9)
"""Used until a worker has reported."""

_COEFFICIENTS = 5  # the first fields of a StepModel


def parse_step_model(reported: Sequence[float]) -> StepModel | None:
    """Return the model in a record or heartbeat: its coefficients, and perhaps what was seen. None
    if there is none or an impossible one."""
    if len(reported) not in (_COEFFICIENTS, len(StepModel._fields)):
        return None
    if not all(0 <= c <= MAX_COEFFICIENT_S for c in reported[:_COEFFICIENTS]):  # refuses NaN, too
        return None
    if not all(1 <= seen <= MAX_SEEN for seen in reported[_COEFFICIENTS:]):
        return None
    return StepModel(*reported)


def mean_step_model(models: Iterable[StepModel | None]) -> StepModel:
    """Return the model of a worker that reports none: the mean over those that do, half by half."""
    known = [m for m in models if m is not None]
    decoding = [m for m in known if _decodes(m)] or [PRIOR_STEP_MODEL]
    prefilling = [m for m in known if _prefills(m)] or [PRIOR_STEP_MODEL]
    return _halves(_mean(decoding), _mean(prefilling))


def complete_step_model(model: StepModel | None, others: StepModel) -> StepModel:
    """Return ``model`` with its unknown half, if any, taken from ``others``. The constant of steps
    that computed prompts is kept, because it was fitted together with the prompts' coefficients."""
    if model is None:
        return others
    decoding = model if _decodes(model) else others._replace(step=model.step or others.step)
    return _halves(decoding, model if _prefills(model) else others)


def trusted_alike(models: dict[str, StepModel]) -> dict[str, StepModel]:
    """Return the models, all trusted up to the largest step that any worker has run. A model that
    is trusted less predicts longer steps, so a worker with few requests so far would get none."""
    seen = _largest_seen(models.values())
    return {instance: StepModel(*m[:_COEFFICIENTS], *seen) for instance, m in models.items()}


def _mean(models: Sequence[StepModel]) -> StepModel:
    columns = list(zip(*models, strict=True))[:_COEFFICIENTS]
    return StepModel(*(sum(column) / len(models) for column in columns), *_largest_seen(models))


def _largest_seen(models: Collection[StepModel]) -> list[float]:
    """Return the largest sizes of steps that any worker has run, infinite where none says so. One
    that does not say so, or has not run yet, is trusted as far as the others."""
    columns = zip(*(m[_COEFFICIENTS:] for m in models), strict=True)
    return [max(filter(math.isfinite, column), default=math.inf) for column in columns]


def _halves(decoding: StepModel, prefilling: StepModel) -> StepModel:
    return decoding._replace(
        prompt_token=prefilling.prompt_token,
        prompt_pair=prefilling.prompt_pair,
        prompt_tokens_seen=prefilling.prompt_tokens_seen,
    )


def _decodes(model: StepModel) -> bool:
    return model.row > 0 or model.kv_token > 0


def _prefills(model: StepModel) -> bool:
    return any(model[3:_COEFFICIENTS])
