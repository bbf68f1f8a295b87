"""A request that has been checked: its choices, and all that answering it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import groupby
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from router.api.form import Answer, Form
from router.choice import Choice, Delta, FinishReason
from router.explain import Explanation, explain
from router.merge import merged
from router.policies import PolicyName
from router.snapshot import Objectives
from router.timeline import timeline
from router.waiting import Shown
from router.wire_json import Usage


class Job(NamedTuple):
    """``choices``: of each prompt ``candidates``, of which the best ``n`` are answered."""

    id: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    arrived: float  # on time.perf_counter
    explain: bool
    timeline: bool
    goals: Objectives
    policy: PolicyName
    timeout_s: float
    form: Form
    choices: list[Choice]
    n: int = 1
    candidates: int = 1

    async def start(self) -> None:
        """Submit all. Raises ApiError for the first that cannot be; the others are to be ended."""
        for choice in self.choices:
            choice.generation.start()
            if len(self.choices) > 1:
                await asyncio.sleep(0)  # placing many takes a while; streams go on

    async def answers(self) -> list[Answer]:
        """All choices, once the last has ended. Raises ApiError or ClientGone."""
        parts = [_Parts() for _ in self.choices]
        async with aclosing(merged([choice.deltas() for choice in self.choices])) as batches:
            async for batch in batches:
                for delta in batch:
                    parts[delta.choice].add(delta)
        whole = [part.answer(choice) for part, choice in zip(parts, self.choices, strict=True)]
        return best(whole, self.n, self.candidates)

    def usage(self) -> Usage:
        """Each prompt counts once, all that was generated counts."""
        firsts = self.choices[:: self.candidates]
        return Usage.of(
            sum(len(choice.prompt) for choice in firsts),
            sum(choice.used for choice in self.choices),
            sum(choice.generation.cached_tokens for choice in firsts),
        )

    def explanation(self) -> Explanation | UnsetType:
        """What the caller wants to be told besides; UNSET for nothing."""
        if not (self.explain or self.timeline):
            return UNSET
        told = Explanation()
        if self.explain:
            attempts = [(c.index, a) for c in self.choices for a in c.generation.attempts]
            told = explain(self.policy, self.goals, attempts)
        if self.timeline:
            events = [timeline(self.arrived, c.generation.attempts) for c in self.choices]
            told = msgspec.structs.replace(told, timeline=events)
        return told

    def abandon(self) -> None:
        """The client is gone: stop all work at once."""
        for choice in self.choices:
            choice.generation.abandon()

    def end(self, status: str) -> None:
        for choice in self.choices:
            choice.end(status)


def best(answers: Sequence[Answer], n: int, candidates: int) -> list[Answer]:
    """Of each prompt's ``candidates`` answers the ``n`` of the greatest log-probability per
    token, as OpenAI ranks them, best first; numbered anew."""
    if n == candidates:
        return list(answers)
    kept = []
    for _, group in groupby(answers, lambda answer: answer.choice // candidates):
        kept += sorted(group, key=lambda answer: -answer.logprob)[:n]
    return [answer._replace(choice=index) for index, answer in enumerate(kept)]


class _Parts:
    """What has come of one choice."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._shown: list[Shown] = []
        self._finish: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._ids += delta.ids
        self._shown += delta.shown
        self._finish = delta.finish

    def answer(self, choice: Choice) -> Answer:
        assert self._finish is not None
        return Answer(
            choice.index,
            choice.prompt,
            "".join(self._texts),
            self._ids,
            self._shown,
            self._finish,
            choice.logprob / max(1, choice.used),
            choice.scores.values,
        )
