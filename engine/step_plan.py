"""What one step computes: the running sequences, as much of them as the policy says. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.policy import Policy, StepState
from engine.sequence import Sequence
from engine.step_time import StepTimeModel, Work


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
