"""The linear model of a worker's step time, as workers fit and report it.

    seconds = step + row*decode_rows + kv_token*decode_kv_tokens
              + prompt_token*u + prompt_pair*u*(m + u/2)

for ``u`` prompt tokens computed after ``m`` tokens. A coefficient is zero where the worker has not
seen that kind of work: a decode worker may never have computed a prompt. Such a half is replaced by
the mean of the other workers, so that unknown work never looks free. Used by the cost function, the
planner, the autoscaler's sizing and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DEFAULT_CHUNK = 512
"""Prompt tokens in a step, for a worker that does not report it."""

MAX_PACE = 17
"""Most tokens of a sequence in one step: its own, and the most drafts that a worker can be set
to."""

MAX_COEFFICIENT_S = 60.0
"""Reports with a larger coefficient are garbage."""


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
    """StepModel in seconds, none negative."""

    step: float
    row: float
    kv_token: float
    prompt_token: float
    prompt_pair: float

    def decode_s(self, rows: float, kv_tokens: float) -> float:
        """Return the seconds of a step that decodes ``rows`` sequences over ``kv_tokens`` in
        all."""
        return self.step + self.row * rows + self.kv_token * kv_tokens

    def prompt_s(self, computed: int, tokens: int) -> float:
        """Return the seconds that ``tokens`` prompt tokens after ``computed`` ones add to steps."""
        pairs = tokens * (computed + tokens / 2)
        return self.prompt_token * tokens + self.prompt_pair * pairs

    def prefill_s(self, computed: int, tokens: int, chunk: int) -> float:
        """Return the seconds of a prompt on an idle worker, its steps included."""
        return self.step * math.ceil(tokens / chunk) + self.prompt_s(computed, tokens)

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


PRIOR_STEP_MODEL = StepModel(5e-3, 5e-5, 5e-8, 5e-5, 1e-9)
"""Used until a worker has reported."""


def parse_step_model(coefficients: Sequence[float]) -> StepModel | None:
    """Return the model in a record or heartbeat; None if it has none or an impossible one."""
    if len(coefficients) != len(StepModel._fields):
        return None
    if not all(0 <= c <= MAX_COEFFICIENT_S for c in coefficients):  # also refuses NaN
        return None
    return StepModel(*coefficients)


def parse_pace(reported: float) -> float:
    """Return the reported tokens per sequence and plain step; 1 for an impossible value."""
    return reported if 1 <= reported <= MAX_PACE else 1.0  # NaN: 1


def mean_step_model(models: Iterable[StepModel | None]) -> StepModel:
    """Return the model of a worker that reports none: the mean over those that do, half by half."""
    known = [m for m in models if m is not None]
    decoding = [m for m in known if _decodes(m)] or [PRIOR_STEP_MODEL]
    prefilling = [m for m in known if _prefills(m)] or [PRIOR_STEP_MODEL]
    return StepModel(
        *(sum(c) / len(decoding) for c in list(zip(*decoding, strict=True))[:3]),
        *(sum(c) / len(prefilling) for c in list(zip(*prefilling, strict=True))[3:]),
    )


def complete_step_model(model: StepModel | None, others: StepModel) -> StepModel:
    """Return ``model`` with its unknown half, if any, taken from ``others``."""
    if model is None:
        return others
    if not _decodes(model):
        model = StepModel(*others[:3], *model[3:])
    if not _prefills(model):
        model = StepModel(*model[:3], *others[3:])
    return model


def _decodes(model: StepModel) -> bool:
    return any(model[:3])


def _prefills(model: StepModel) -> bool:
    return any(model[3:])
