"""From an HTTP request to a job: everything that can be wrong is found here."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from protocol.registry.directory import ModelInfo
from router.common.errors import ApiError, invalid, unavailable
from router.common.request_body import read_object
from router.http.job import Job, Origin, Plan, check_vocabulary, job_of
from router.http.state import RouterState
from router.openai.bodies.generation_body import GenerationBody
from router.placement.admission import Patience
from router.settings import RouterSettings

EXPLAIN = "x-baton-explain"
TIMELINE = "x-baton-timeline"
TTFT_DEADLINE = "x-baton-ttft-deadline-ms"

Body = TypeVar("Body", bound=GenerationBody)
Parse = Callable[[Mapping[str, Any]], Body]
Prepare = Callable[[RouterState, Body, ModelInfo, str], Awaitable[Plan]]  # str: the tenant


async def take_in(
    state: RouterState, http: HttpRequest, parse: Parse[Body], prepare: Prepare[Body]
) -> Job:
    """Read and check a request for generated tokens: ``parse`` checks what can be told from the
    body alone, ``prepare`` the rest. Raises ApiError or ClientGone."""
    arrived = time.perf_counter()
    settings = state.settings
    tenant = state.tenants.of(http.headers.get("authorization"))
    patience = _patience(http, settings)
    raw = await read_object(http, settings.max_body_bytes, settings.body_timeout_s)
    body = parse(raw)
    check_model(state, body.model)
    tenant.check(body.priority)
    model = _let_in(state, body)
    plan = await prepare(state, body, model, tenant.name)
    check_vocabulary(body, plan, model)
    state.metrics.demand.arrived([len(prompt) for prompt in plan.prompts], plan.candidates)
    state.admission.check(body.priority, len(plan.prompts) * plan.candidates)
    explain, timeline = (http.headers.get(name) == "1" for name in (EXPLAIN, TIMELINE))
    origin = Origin(arrived, patience, tenant, explain, timeline)
    return job_of(state, body, plan, model, origin)


def _let_in(state: RouterState, body: GenerationBody) -> ModelInfo:
    """The model. Raises ApiError (503, 429) where there is no use in looking at the prompts."""
    model = state.pool.model
    try:
        if model is None or not state.pool.attached:
            raise unavailable("no decode worker is attached; try again shortly")
        state.admission.check(body.priority)
    except ApiError:
        state.metrics.demand.refused(body.generations)
        raise
    return model


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
