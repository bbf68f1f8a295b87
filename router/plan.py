"""What a checked body asks for, in the terms of the router; and the job that this becomes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from protocol.blocks import block_keys, cache_root
from protocol.directory import ModelInfo
from protocol.request import MAX_SEED, Request, Sampling
from router.admission import Patience
from router.api.fields import GenerationBody
from router.api.form import Form, Head
from router.choice import Choice, Manner
from router.errors import invalid
from router.generate import Generation, Wanted
from router.job import Job
from router.meter import Meter
from router.scores import PromptScores
from router.state import RouterState
from router.tenants import Tenant
from router.text import TextStream

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
