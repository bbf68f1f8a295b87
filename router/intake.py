"""From an HTTP request to a job: everything that can be wrong is found here."""

from __future__ import annotations

import math
import secrets
import time

from fastapi import Request as HttpRequest

from protocol.blocks import block_keys, cache_root
from protocol.directory import ModelInfo
from protocol.request import MAX_SEED, Request, Sampling
from router import tokens
from router.admission import Patience
from router.body import read_object
from router.errors import ApiError, invalid, unavailable
from router.generate import Generation, Wanted
from router.metrics import Meter
from router.respond import Job
from router.schema import CompletionBody, parse
from router.settings import RouterSettings
from router.state import RouterState
from router.tenants import Tenant
from router.text import TextStream

EXPLAIN = "x-baton-explain"
TTFT_DEADLINE = "x-baton-ttft-deadline-ms"


async def take_in(state: RouterState, http: HttpRequest) -> Job:
    """Read and check a completion request. Raises ApiError or ClientGone."""
    arrived = time.perf_counter()
    settings = state.settings
    tenant = state.tenants.of(http.headers.get("authorization"))
    patience = _patience(http, settings)
    body = parse(await read_object(http, settings.max_body_bytes))
    check_model(state, body.model)
    tenant.check(body.priority)
    model = state.pool.model
    if model is None or not state.pool.attached:
        raise unavailable("no decode worker is attached; try again shortly")
    state.admission.check(body.priority)
    prompt = await _prompt_ids(state, body)
    _check_room(prompt, body, model)
    _check_vocabulary(prompt, body, model)
    request = _request(state, body, prompt, model, tenant)
    keys = block_keys(request.cache_root, request.prompt)
    wanted = Wanted(request, keys, arrived, patience)
    return Job(
        id=request.id,
        created=int(time.time()),
        model=settings.model_id,
        prompt=request.prompt,
        stream=body.stream,
        include_usage=body.include_usage,
        return_token_ids=body.return_token_ids,
        explain=http.headers.get(EXPLAIN) == "1",
        goals=settings.goals,
        policy=settings.routing_policy,
        timeout_s=settings.request_timeout_s,
        generation=Generation(state.routing, wanted),
        text=TextStream(state.new_detokenizer(), body.stop),
        meter=Meter(state.metrics, arrived),
    )


def check_model(state: RouterState, name: str) -> None:
    """Raises ApiError (404) for a model that is not served here."""
    served = state.settings.model_id
    if name != served:
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


def _patience(http: HttpRequest, settings: RouterSettings) -> Patience:
    given = http.headers.get(TTFT_DEADLINE)
    if given is None:
        return settings.patience
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < math.inf:
        raise invalid(
            f"{TTFT_DEADLINE} must be a number of milliseconds above 0, not {given[:80]!r}",
            TTFT_DEADLINE,
        )
    return Patience(milliseconds / 1000)


async def _prompt_ids(state: RouterState, body: CompletionBody) -> list[int]:
    if not isinstance(body.prompt, str):
        return body.prompt
    try:
        return await tokens.encode(state.tokenizer, body.prompt)
    except UnicodeEncodeError:
        raise invalid("prompt must be text, but holds half of a surrogate pair", "prompt") from None


def _check_room(prompt: list[int], body: CompletionBody, model: ModelInfo) -> None:
    if not prompt:
        raise invalid("prompt holds no tokens", "prompt")
    if len(prompt) + body.max_tokens > model.max_model_len:
        raise invalid(
            f"the model takes {model.max_model_len} tokens, prompt and output together; this"
            f" request has {len(prompt)} in the prompt and asks for {body.max_tokens} (max_tokens)",
            "prompt" if len(prompt) >= model.max_model_len else "max_tokens",
            "context_length_exceeded",
        )


def _check_vocabulary(prompt: list[int], body: CompletionBody, model: ModelInfo) -> None:
    biased = [token for token, _ in body.logit_bias]
    named = {"prompt": prompt, "logit_bias": biased, "stop_token_ids": body.stop_token_ids}
    for field, ids in named.items():
        highest = max(ids, default=0)
        if highest >= model.vocab_size:
            raise invalid(
                f"{field} holds token id {highest}; the vocabulary ends at {model.vocab_size - 1}",
                field,
            )


def _request(
    state: RouterState, body: CompletionBody, prompt: list[int], model: ModelInfo, tenant: Tenant
) -> Request:
    # Any 64-bit seed is taken; the wire has the non-negative ones.
    seed = secrets.randbits(63) if body.seed is None else body.seed & MAX_SEED
    return Request(
        id=f"cmpl-{secrets.token_hex(16)}",
        prompt=tuple(prompt),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias,
            seed=seed,
            max_tokens=body.max_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop_token_ids=body.stop_token_ids,
        ),
        cache_root=cache_root(
            *(state.settings.secret, tenant.name, model.fingerprint, model.precision),
            body.cache_salt or "",
        ),
        priority=body.priority,
    )
