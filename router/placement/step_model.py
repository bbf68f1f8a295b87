"""How long a worker's steps take, as the worker fits and reports it.

    seconds = step + row*decode_rows + kv_token*decode_kv_tokens
              + prompt_token*u + prompt_pair*u*(m + u/2)

for ``u`` prompt tokens after ``m`` computed ones. A coefficient is zero where a worker has not seen
that kind of work: a decode worker may never have computed a prompt. Such a half is taken from
the other workers, so that the unknown never looks free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CHUNK = 512
"""Prompt tokens in a step, for a worker that does not say."""


class StepModel(NamedTuple):
    """Coefficients in seconds; none is negative."""

    step: float
    row: float
    kv_token: float
    prompt_token: float
    prompt_pair: float

    def decode_s(self, rows: float, kv_tokens: float) -> float:
        """A step that decodes ``rows`` sequences over ``kv_tokens`` tokens in all."""
        return self.step + self.row * rows + self.kv_token * kv_tokens

    def prompt_s(self, computed: int, tokens: int) -> float:
        """What ``tokens`` prompt tokens after ``computed`` ones add to the steps they are in."""
        pairs = tokens * (computed + tokens / 2)
        return self.prompt_token * tokens + self.prompt_pair * pairs

    def prefill_s(self, computed: int, tokens: int, chunk: int) -> float:
        """A prompt alone: its steps and what it adds to them."""
        return self.step * math.ceil(tokens / chunk) + self.prompt_s(computed, tokens)


PRIOR = StepModel(5e-3, 5e-5, 5e-8, 5e-5, 1e-9)
"""As long as no worker has said anything."""


MOST_TOKENS = 17
"""Of a sequence in one step: its own, and the most drafts that a worker is configured for."""

LONGEST_S = 60.0
"""More than any coefficient can be; what claims more is garbage."""


def parse(coefficients: Sequence[float]) -> StepModel | None:
    """The model in a record or heartbeat; None for none, or for what cannot be one."""
    if len(coefficients) != len(StepModel._fields):
        return None
    if not all(0 <= c <= LONGEST_S for c in coefficients):  # also refuses NaN
        return None
    return StepModel(*coefficients)


def pace(told: float) -> float:
    """Tokens that a sequence gets in the time of a plain step, as a worker says; 1 where it says
    what cannot be."""
    return told if 1 <= told <= MOST_TOKENS else 1.0  # NaN: 1


def pooled(models: Iterable[StepModel | None]) -> StepModel:
    """What to take for a worker that does not know: the mean of those that do, half by half."""
    known = [m for m in models if m is not None]
    decoding = [m for m in known if _decodes(m)] or [PRIOR]
    prefilling = [m for m in known if _prefills(m)] or [PRIOR]
    return StepModel(
        *(sum(c) / len(decoding) for c in list(zip(*decoding, strict=True))[:3]),
        *(sum(c) / len(prefilling) for c in list(zip(*prefilling, strict=True))[3:]),
    )


def completed(model: StepModel | None, others: StepModel) -> StepModel:
    """``model`` with the half that it does not know taken from ``others``."""
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
