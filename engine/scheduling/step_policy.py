"""The step policy: how many prompt tokens of each prefill go into a step.

A policy is a pure function of a ``StepState``. Each role has its own:
``plan_prefill_step`` and ``plan_decode_step``. The scheduler calls ``StepPlanner``, which
shows the policy the running sequences and returns the ``StepPlan`` that the engine executes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from engine.ipc.settings import StepSettings
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_time import StepTimeModel
from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import StepModel, StepWork, is_short_prompt

SHORT_STEP_SHARE = 4
"""Short prompts that go beside longer ones get at most 1/n of a step's tokens."""

CHUNK_SHARE_BEFORE_FIT = 4
"""A step with a budget gets 1/n of the chunk as prompt tokens until step times can be predicted."""


class StepBounds(NamedTuple):
    """What bounds a step in which sequences decode, in seconds. ``budget_s`` is the configured
    duration of such a step: None leaves it to the role's policy, 0 means no bound. The objectives
    are those of the deployment; None: unknown."""

    budget_s: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    @classmethod
    def from_settings(cls, settings: StepSettings) -> StepBounds:
        budget_ms = settings.step_budget_ms
        budget_s = None if budget_ms is None else budget_ms / 1e3
        return cls(budget_s, settings.ttft_slo_s, settings.tpot_slo_s)


class StepState(msgspec.Struct, frozen=True):
    """The snapshot that a policy decides from."""

    decoding: int  # sequences that decode one token in this step
    decode_kv_tokens: int  # tokens that they attend to
    remaining: Seq[int]  # [prefills] uncomputed tokens, the most urgent sequence first
    computed: Seq[int]  # [prefills] computed tokens
    chunk: int  # configured limit of prompt tokens in a step
    bounds: StepBounds = StepBounds()
    step_time: StepModel | None = None  # None: too few steps were observed
    short: int = 0  # of the first prefills, that go beside older and longer ones


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


def short_first(remaining: Seq[int], chunk: int) -> tuple[list[int], int]:
    """Return the order in which prefills get their tokens, and how many short ones come first. Of a
    step these take a quarter at most, so that they wait for one step and not for a long prompt,
    which they delay hardly at all (as the shortest remaining time first does: Schrage, Operations
    Research 16(3), 1968). Without a longer one before them, the order stays."""
    first, left = list[int](), chunk // SHORT_STEP_SHARE
    for at, tokens in enumerate(remaining):
        if is_short_prompt(tokens, chunk) and tokens <= left:
            first.append(at)
            left -= tokens
    if first == list(range(len(first))):
        return list(range(len(remaining))), 0
    taken = set(first)
    return first + [at for at in range(len(remaining)) if at not in taken], len(first)


def chunks_within_seconds(state: StepState, seconds: float) -> list[int]:
    """Give prompt tokens to the most urgent sequences first while the predicted step stays within
    ``seconds``: at most ``chunk``, and at least one block, so that prefill makes progress however
    long decoding takes. Short ones that come first get half of the seconds at most."""
    least = min(BLOCK_TOKENS, state.chunk)
    if state.step_time is None:
        return chunks_in_order(state.remaining, max(least, state.chunk // CHUNK_SHARE_BEFORE_FIT))
    used_s = 0.0
    left = seconds - state.step_time.seconds(StepWork(state.decoding, state.decode_kv_tokens))
    budget, before_s = state.chunk, left
    if state.short:
        left = before_s / 2
    counts = list[int]()
    for tokens, computed in zip(state.remaining, state.computed, strict=True):
        if counts and len(counts) == state.short:
            left = before_s - used_s
        fitting = state.step_time.prompt_tokens_within(left, computed)
        count = int(min(tokens, budget, fitting))
        counts.append(count)
        budget -= count
        added_s = state.step_time.added_seconds(
            StepWork(0, 0, count, count * (computed + count / 2))
        )
        used_s += added_s
        left = left - added_s if count == tokens else 0.0  # later sequences do not overtake it
    if sum(counts) < least:  # too little to share: the oldest goes on, and none starves
        others = len(state.remaining) - state.short
        turn = [*state.remaining[state.short :], *state.remaining[: state.short]]
        counts = chunks_in_order(turn, least)
        return counts[others:] + counts[:others]
    return counts


def choose_chunks(state: StepState, own_budget_s: float) -> list[int]:
    """Return the chunks of a role whose step budget is ``own_budget_s``, infinite without a bound,
    unless one is configured. A step without decoding sequences always takes the whole chunk."""
    configured = state.bounds.budget_s
    budget = own_budget_s if configured is None else configured or math.inf
    if not state.decoding or budget == math.inf:
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
    """Asks the policy for each step. ``policy`` may be replaced between two steps (a role flip)."""

    def __init__(
        self, policy: StepPolicy, chunk: int, bounds: StepBounds, step_time: StepTimeModel
    ) -> None:
        self.policy = policy
        self._chunk = chunk
        self._bounds = bounds
        self._step_time = step_time

    def plan(self, decoding: Seq[Sequence], prefilling: Seq[Sequence]) -> StepPlan:
        kv_tokens = sum([s.computed for s in decoding]) + len(decoding)
        chunks: tuple[tuple[Sequence, int], ...] = ()
        if prefilling:
            prefilling, short = self._in_turn(prefilling)
            counts = self.policy(self._state(decoding, kv_tokens, prefilling, short))
            chunks = tuple((s, n) for s, n in zip(prefilling, counts, strict=True) if n)
        tokens = sum(n for _, n in chunks)
        pairs = sum(n * (s.computed + n / 2) for s, n in chunks)
        return StepPlan(tuple(decoding), chunks, StepWork(len(decoding), kv_tokens, tokens, pairs))

    def _state(
        self, decoding: Seq[Sequence], kv_tokens: int, prefilling: Seq[Sequence], short: int
    ) -> StepState:
        return StepState(
            decoding=len(decoding),
            decode_kv_tokens=kv_tokens,
            remaining=[s.remaining for s in prefilling],
            computed=[s.computed for s in prefilling],
            chunk=self._chunk,
            bounds=self._bounds,
            step_time=self._step_time.known,
            short=short,
        )

    def _in_turn(self, prefilling: Seq[Sequence]) -> tuple[list[Sequence], int]:
        """Return the prefills with the short ones of the most urgent class first, and the number of
        these."""
        urgency = prefilling[0].order[0]
        own = [s for s in prefilling if s.order[0] == urgency]
        order, short = short_first([s.remaining for s in own], self._chunk)
        return [*(own[at] for at in order), *prefilling[len(own) :]], short


def plan_prefill_step(state: StepState) -> list[int]:
    """Return the prompt tokens to compute for each prefill: [prefills].

    The most urgent prompt comes first and may take what short ones leave of the chunk, so that its
    TTFT is not spent on prompts behind it; others share the step with the tail of the one before.
    No budget bounds the step unless one is configured: no stream waits for its next token."""
    return choose_chunks(state, math.inf)


URGENT_TTFT_SHARE = 0.25
"""Prompts that take this share of the TTFT objective to compute get all of a step that the TPOT
objective leaves. At half of it, they have the other half for their place in the queue and for the
steps between theirs."""

LARGEST_BUDGET_SHARE = 0.95
"""Share of the TPOT objective that a step with prompts takes at most. The rest is for what comes
beside the steps, as the wait for the last KV, and for the error of their prediction: a short answer
may see no other steps."""

LEAST_PROMPT_SHARE = 0.25
"""Prompts get at least this share of decoding's time where decoding alone takes the whole TPOT
objective. Otherwise sequences would leave the batch faster than new ones join it."""


def decode_step_budget_s(
    alone_s: float, prompts_s: float, ttft_slo_s: float | None, tpot_slo_s: float | None
) -> float:
    """Return the seconds of a step that computes prompts beside decoding sequences.

    ``alone_s``: the step without prompts. ``prompts_s``: computing all prompts that are waiting.
    While prompts are computed, every sequence gets a token per step, so that a step is the longest
    inter-token latency, and prompts have the share 1 - alone/budget of the worker. So

        budget = min(alone + max(alone, u^2 * (most - alone)),  max(most, 1.25 * alone))
        u      = min(1, prompts / (ttft_slo / 4))
        most   = 0.95 * tpot_slo

    - Prompts get as long as decoding. That at most doubles both the inter-token latency and the
      time of the prompts, and their product would be larger with any other share.
    - As prompts pile up, they get more, up to all that the TPOT objective leaves. Half of the
      worker may be less than arrives, and where a step takes the same time for any batch, a late
      prompt costs throughput, too.
    - Steps stay a little below the TPOT objective: it then holds for every sequence, however many
      prompts come in its lifetime. Only where decoding alone takes (nearly) as long, prompts get a
      fifth of the worker. Longer steps would meet the mean of many tokens as well, but that of a
      short answer only by chance.

    Without objectives the first rule alone decides.
    """
    if ttft_slo_s is None or tpot_slo_s is None:
        return 2 * alone_s
    urgency = min(1.0, prompts_s / (URGENT_TTFT_SHARE * ttft_slo_s))
    most_s = LARGEST_BUDGET_SHARE * tpot_slo_s
    budget_s = alone_s + max(alone_s, urgency**2 * (most_s - alone_s))
    return min(budget_s, max(most_s, (1 + LEAST_PROMPT_SHARE) * alone_s))


def plan_decode_step(state: StepState) -> list[int]:
    """Return the prompt tokens to compute for each prefill: [prefills].

    Decoding goes on in every step, and prompts take the rest of its budget."""
    if state.step_time is None:
        return choose_chunks(state, 0.0)  # a share of the chunk, until times can be predicted
    alone_s = state.step_time.seconds(StepWork(state.decoding, state.decode_kv_tokens))
    tokens = zip(state.remaining, state.computed, strict=True)
    pairs = sum(n * (m + n / 2) for n, m in tokens)
    prompts_s = state.step_time.added_seconds(StepWork(0, 0, sum(state.remaining), pairs))
    _, ttft_slo_s, tpot_slo_s = state.bounds
    return choose_chunks(state, decode_step_budget_s(alone_s, prompts_s, ttft_slo_s, tpot_slo_s))
