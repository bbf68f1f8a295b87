"""The decision of a step: how many prompt tokens go into it. One pure function for each role."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_time import Coefficients, StepTimeModel, Work
from protocol.block_keys import BLOCK_TOKENS

UNKNOWN_SHARE = 4
"""Share of the chunk (1/n) that a prompt may take of a step with a budget as long as nothing is
known of how long steps take."""


class StepState(msgspec.Struct, frozen=True):
    """What a policy may look at."""

    decoding: int  # sequences that decode one token in this step
    decode_kv_tokens: int  # tokens that they attend to
    remaining: Seq[int]  # uncomputed tokens of each sequence in prefill, most urgent first
    computed: Seq[int]  # computed tokens of the same
    chunk: int  # most prompt tokens that the configuration allows in a step
    budget_s: float | None = None  # seconds of a step as configured; None: the role's own choice
    step_time: Coefficients | None = None  # None: nothing is known yet


Policy: TypeAlias = Callable[[StepState], list[int]]
"""Tokens to compute for each entry of ``remaining``; zeros are allowed, more than remaining not."""


def fill_in_order(remaining: Seq[int], budget: int) -> list[int]:
    """Give the budget to the most urgent first."""
    counts = []
    for tokens in remaining:
        count = min(tokens, budget)
        counts.append(count)
        budget -= count
    return counts


def fill_within(state: StepState, seconds: float) -> list[int]:
    """As many prompt tokens, the most urgent first, as keep the predicted step within ``seconds``:
    at most ``chunk``, and at least one block, so that prefill goes on however long decoding takes.
    """
    least = min(BLOCK_TOKENS, state.chunk)
    if state.step_time is None:
        return fill_in_order(state.remaining, max(least, state.chunk // UNKNOWN_SHARE))
    left = seconds - state.step_time.seconds(Work(state.decoding, state.decode_kv_tokens))
    budget = state.chunk
    counts = []
    for tokens, computed in zip(state.remaining, state.computed, strict=True):
        fitting = state.step_time.prompt_tokens_within(left, computed)
        count = int(min(tokens, budget, fitting))
        counts.append(count)
        budget -= count
        if count < tokens:
            left = 0.0  # the next ones do not pass it
        else:
            added = Work(0, 0, count, count * (computed + count / 2))
            left -= state.step_time.added_seconds(added)
    if sum(counts) < least:
        return fill_in_order(state.remaining, least)
    return counts


def fill(state: StepState, own_budget_s: float) -> list[int]:
    """The chunks of a role whose budget is ``own_budget_s`` unless configured; 0: none. A budget is
    for those that decode: a step without them takes the whole chunk."""
    budget = own_budget_s if state.budget_s is None else state.budget_s
    if not state.decoding or budget == 0:
        return fill_in_order(state.remaining, state.chunk)
    return fill_within(state, budget)


# MERGED engine.step_plan
# What one step computes: the running sequences, as much of them as the policy says. Torch-free.


@dataclass(frozen=True)
class StepPlan:
    """Sequences of one step: those that decode, and the prompt chunks (sequence, tokens)."""

    decode: tuple[Sequence, ...]
    chunks: tuple[tuple[Sequence, int], ...]
    work: Work
    wanted: tuple[int, ...] = ()  # draft nodes for each that decodes, at most; empty: none

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class StepPlanner:
    """Shows the policy what runs. ``policy`` may be replaced at any step boundary (a role flip).
    ``budget_s``: seconds of a step; None: the policy's own, 0: no bound."""

    def __init__(
        self, policy: Policy, chunk: int, budget_s: float | None, step_time: StepTimeModel
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
        return StepPlan(tuple(decoding), chunks, Work(len(decoding), kv_tokens, tokens, pairs))

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
