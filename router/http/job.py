"""A request that has been checked: its choices, and all that answering it takes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from protocol.block_keys import block_keys, cache_root
from protocol.registry.directory import ModelInfo
from protocol.requests import MAX_SEED, Request, Sampling
from router.common.errors import invalid
from router.common.merge_streams import merged
from router.common.tenants import Tenant
from router.generation.choice_stream import (
    Choice,
    Delta,
    FinishReason,
    Manner,
    PromptScores,
    TextStream,
)
from router.generation.explain import Explanation, explain
from router.generation.generation import Generation, Wanted
from router.generation.pending_logprobs import Shown
from router.generation.stopwatch import Meter
from router.generation.timeline import timeline
from router.http.state import RouterState
from router.openai.answers.answer_form import Answer, Form, Head
from router.openai.answers.wire_json import Usage
from router.openai.bodies.generation_body import GenerationBody
from router.placement.admission import Patience
from router.placement.policies import PolicyName
from router.placement.snapshot import Objectives


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


# MERGED router.plan
# What a checked body asks for, in the terms of the router; and the job that this becomes.

Prompt = tuple[int, ...]


class Plan(NamedTuple):
    """``form``: made for the answer's head, and the prompt of each choice."""

    prefix: str  # of the answer's id
    prompts: list[Prompt]
    max_tokens: int  # output tokens of each choice; 0: only the prompt is wanted
    form: Callable[[Head, list[Prompt]], Form]
    manner: Manner
    candidates: int  # choices of each prompt, of which the best ``n`` are answered
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""


class Origin(NamedTuple):
    """Where a request came from."""

    arrived: float  # on time.perf_counter
    patience: Patience
    tenant: Tenant
    explain: bool
    timeline: bool


def job_of(
    state: RouterState, body: GenerationBody, plan: Plan, model: ModelInfo, origin: Origin
) -> Job:
    """Nothing is submitted yet. ``plan`` is checked."""
    settings = state.settings
    name = f"{plan.prefix}-{secrets.token_hex(16)}"
    head = Head(name, int(time.time()), settings.model_id, f"fp_{model.fingerprint[:16]}")
    requests = _requests(state, name, body, plan, model, origin.tenant)
    form = plan.form(head, [request.prompt for request in requests])
    return Job(
        id=name,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        arrived=origin.arrived,
        explain=origin.explain,
        timeline=origin.timeline,
        goals=settings.goals,
        policy=settings.routing_policy,
        timeout_s=settings.request_timeout_s,
        form=form,
        choices=_choices(state, body, plan, requests, origin),
        n=body.n,
        candidates=plan.candidates,
    )


def _choices(
    state: RouterState, body: GenerationBody, plan: Plan, requests: list[Request], origin: Origin
) -> list[Choice]:
    choices, keys, scores = [], list[bytes](), PromptScores()
    metrics, arrived = state.metrics, origin.arrived
    for index, request in enumerate(requests):
        if index % plan.candidates == 0:  # the choices of a prompt share these
            keys, scores = block_keys(request.cache_root, request.prompt), PromptScores()
        wanted = Wanted(request, keys, arrived, origin.patience, body.stream)
        text = TextStream(
            state.vocabulary.detokenizer(skip_special=plan.manner.skip_special),
            body.stop,
            free=body.min_tokens,
            keep=body.include_stop_str_in_output,
            tracked=plan.manner.tracked,
        )
        choices.append(
            Choice(
                *(index, request.prompt, Generation(state.routing, wanted), text),
                Meter(metrics, arrived, len(request.prompt)),
                *(state.vocabulary, plan.manner, scores),
            )
        )
    return choices


def _requests(
    state: RouterState,
    name: str,
    body: GenerationBody,
    plan: Plan,
    model: ModelInfo,
    tenant: Tenant,
) -> list[Request]:
    """One for each choice. Those of one prompt share a seed and differ in ``choice`` only, so that
    a prompt among others gets what it would get alone; the first of them asks about the prompt."""
    # Any 64-bit seed is taken; the wire has the non-negative ones.
    seed = secrets.randbits(63) if body.seed is None else body.seed & MAX_SEED
    salt = body.cache_salt or ""
    secret = state.settings.secret
    root = cache_root(secret, tenant.name, model.fingerprint, model.precision, salt)
    several = len(plan.prompts) * plan.candidates > 1
    return [
        Request(
            id=f"{name}-{place * plan.candidates + choice}" if several else name,
            prompt=prompt,
            sampling=_sampling(body, plan, seed, choice),
            cache_root=root,
            priority=body.priority,
        )
        for place, prompt in enumerate(plan.prompts)
        for choice in range(plan.candidates)
    ]


def _sampling(body: GenerationBody, plan: Plan, seed: int, choice: int) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=seed,
        choice=choice,
        max_tokens=max(plan.max_tokens, 1),  # workers always draw one
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=body.stop_token_ids,
        logprobs=plan.logprobs,
        prompt_logprobs=plan.prompt_logprobs if choice == 0 else None,
        grammar=plan.grammar,
    )


def manner_of(
    state: RouterState,
    body: GenerationBody,
    *,
    tracked: bool,
    echo: bool = False,
    scored_only: bool = False,
) -> Manner:
    return Manner(
        tracked=tracked,
        echo=echo,
        stops=state.vocabulary.eos | frozenset(body.stop_token_ids),
        shows_stops=body.include_stop_str_in_output,
        skip_special=body.skip_special_tokens,
        scored_only=scored_only,
    )


def check_vocabulary(body: GenerationBody, plan: Plan, model: ModelInfo) -> None:
    """Raises ApiError (400) for ids beyond the vocabulary."""
    named = {
        "prompt": [max(prompt) for prompt in plan.prompts],
        "logit_bias": [token for token, _ in body.logit_bias],
        "stop_token_ids": body.stop_token_ids,
    }
    for field, ids in named.items():
        highest = max(ids, default=0)
        if highest >= model.vocab_size:
            raise invalid(
                f"{field} holds token id {highest}; the vocabulary ends at {model.vocab_size - 1}",
                field,
            )
