"""The step policy: how many prompt tokens of each prefill go into a step.

A policy is a pure function of a ``StepState``. Each role has its own:
``plan_prefill_step`` and ``plan_decode_step``. The scheduler calls ``StepPlanner``, which
shows the policy the running sequences and returns the ``StepPlan`` that the engine executes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_time import Coefficients, StepTimeModel, StepWork
from protocol.block_keys import BLOCK_TOKENS

CHUNK_SHARE_BEFORE_FIT = 4
"""A step with a budget gets 1/n of the chunk as prompt tokens until step times can be predicted."""


class StepState(msgspec.Struct, frozen=True):
    """The snapshot that a policy decides from."""

    decoding: int  # sequences that decode one token in this step
    decode_kv_tokens: int  # tokens that they attend to
    remaining: Seq[int]  # [prefills] uncomputed tokens, the most urgent sequence first
    computed: Seq[int]  # [prefills] computed tokens
    chunk: int  # configured limit of prompt tokens in a step
    budget_s: float | None = None  # configured seconds of a step; None: the role's own budget
    step_time: Coefficients | None = None  # None: too few steps were observed


StepPolicy: TypeAlias = Callable[[StepState], list[int]]
"""Returns the tokens to compute [prefills], each at least 0 and at most its ``remaining``."""


def chunks_in_order(remaining: Seq[int], budget: int) -> list[int]:
    """Give ``budget`` tokens to the most urgent sequences first."""
    counts = []
    for tokens in remaining:
        count = min(tokens, budget)
        counts.append(count)
        budget -= count
    return counts


def chunks_within_seconds(state: StepState, seconds: float) -> list[int]:
    """Give prompt tokens to the most urgent sequences first while the predicted step stays within
    ``seconds``: at most ``chunk``, and at least one block, so that prefill makes progress however
    long decoding takes."""
    least = min(BLOCK_TOKENS, state.chunk)
    if state.step_time is None:
        return chunks_in_order(state.remaining, max(least, state.chunk // CHUNK_SHARE_BEFORE_FIT))
    left = seconds - state.step_time.seconds(StepWork(state.decoding, state.decode_kv_tokens))
    budget = state.chunk
    counts = []
    for tokens, computed in zip(state.remaining, state.computed, strict=True):
        fitting = state.step_time.prompt_tokens_within(left, computed)
        count = int(min(tokens, budget, fitting))
        counts.append(count)
        budget -= count
        if count < tokens:
            left = 0.0  # later sequences do not overtake it
        else:
            added = StepWork(0, 0, count, count * (computed + count / 2))
            left -= state.step_time.added_seconds(added)
    if sum(counts) < least:
        return chunks_in_order(state.remaining, least)
    return counts


def choose_chunks(state: StepState, own_budget_s: float) -> list[int]:
    """Return the chunks of a role whose step budget is ``own_budget_s`` unless one is configured. A
    budget of 0 means no bound. A step without decoding sequences always takes the whole chunk."""
    budget = own_budget_s if state.budget_s is None else state.budget_s
    if not state.decoding or budget == 0:
        return chunks_in_order(state.remaining, state.chunk)
    return chunks_within_seconds(state, budget)


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. The scheduler creates it, the engine adds draft nodes, and the
    stepper runs it."""

    decode: tuple[Sequence, ...]
    chunks: tuple[tuple[Sequence, int], ...]
    work: StepWork
    draft_nodes: tuple[int, ...] = ()  # limit for each sequence in ``decode``; empty: no drafts

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class StepPlanner:
    """Asks the policy for each step. ``policy`` may be replaced between two steps (a role flip).
    ``budget_s`` is the configured length of a step: None leaves it to the policy, 0 is no bound."""

    def __init__(
        self, policy: StepPolicy, chunk: int, budget_s: float | None, step_time: StepTimeModel
    ) -> None:
        self.policy = policy
        self._chunk = chunk
        self._budget_s = budget_s
        self._step_time = step_time

    def plan(self, decoding: Seq[Sequence], prefilling: Seq[Sequence]) -> StepPlan:
        kv_tokens = sum([s.computed for s in decoding]) + len(decoding)
        chunks: tuple[tuple[Sequence, int], ...] = ()
        if prefilling:
            counts = self.policy(self._state(decoding, kv_tokens, prefilling))
            chunks = tuple((s, n) for s, n in zip(prefilling, counts, strict=True) if n)
        tokens = sum(n for _, n in chunks)
        pairs = sum(n * (s.computed + n / 2) for s, n in chunks)
        return StepPlan(tuple(decoding), chunks, StepWork(len(decoding), kv_tokens, tokens, pairs))

    def _state(
        self, decoding: Seq[Sequence], kv_tokens: int, prefilling: Seq[Sequence]
    ) -> StepState:
        return StepState(
            decoding=len(decoding),
            decode_kv_tokens=kv_tokens,
            remaining=[s.remaining for s in prefilling],
            computed=[s.computed for s in prefilling],
            chunk=self._chunk,
            budget_s=self._budget_s,
            step_time=self._step_time.known,
        )


PREFILL_STEP_BUDGET_S = 0.0
"""No limit: on a prefill worker no stream waits for its next token."""


def plan_prefill_step(state: StepState) -> list[int]:
    """Return the prompt tokens to compute for each prefill: [prefills].

    The most urgent prompt comes first and may take the whole chunk, so that its TTFT is not spent
    on prompts behind it; a short prompt shares the step with the tail of the one before it."""
    return choose_chunks(state, PREFILL_STEP_BUDGET_S)


DECODE_STEP_BUDGET_S = 0.05
"""Longest step, roughly, while sequences decode: prompts that are computed here must leave the
inter-token latency of the others where the output still reads as a stream."""


def plan_decode_step(state: StepState) -> list[int]:
    """Return the prompt tokens to compute for each prefill: [prefills].

    Decoding goes on in every step, and prompts take the rest of its budget. Where decoding alone
    takes most of the budget, prompts get as long as decoding, because otherwise sequences would
    leave the batch faster than new ones join it."""
    decoding = StepWork(state.decoding, state.decode_kv_tokens)
    alone = 0.0 if state.step_time is None else state.step_time.seconds(decoding)
    return choose_chunks(state, max(DECODE_STEP_BUDGET_S, 2 * alone))
