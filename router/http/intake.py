"""An HTTP request becomes a ``GenerationResponse``; all errors of the client are found here.

    head, API key, rates -> body -> model, priority -> GenerationPlan -> admission -> ChoiceStreams

The routes of ``router.http.app`` call ``accept_request``. Nothing is submitted to workers before
the response that it returns is called.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import secrets
import time

from fastapi import Request as HttpRequest
from fastapi import Response
from msgspec.structs import replace

from protocol.block_keys import KEYS_AT_ONCE, block_key_parts, cache_root
from protocol.registry.directory import ModelInfo
from protocol.requests import Request
from router.common.errors import ApiError, invalid, unavailable
from router.common.request_body import announced_bytes, read_json_object
from router.common.work_lane import WorkClaim
from router.generation.choice_stream import ChoiceStream, GenerationRequest
from router.generation.choice_turn import RequestEntry
from router.generation.output_text import SharedPromptLogprobs
from router.http.dialect import Body, Dialect, check_served_model, check_unknown_fields
from router.http.generation_plan import GenerationPlan
from router.http.response import STREAM_MEDIA_TYPE, GenerationResponse, ResponseOptions
from router.http.state import RouterState
from router.observation.request_record import record_of
from router.openai.answers.formatter import ResponseHeader
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.unknown_fields import ignored_headers
from router.placement.admission import AdmissionLimits
from router.tenants.accounts import RequestAccount
from router.tenants.key_store import authorization_of
from router.tenants.tenant import Tenant

EXPLAIN_HEADER = "x-baton-explain"
TIMELINE_HEADER = "x-baton-timeline"
TTFT_DEADLINE_HEADER = "x-baton-ttft-deadline-ms"
SESSION_HEADER = "x-session-id"
CLAUDE_SESSION_HEADERS = ("x-claude-code-session-id", "x-claude-code-agent-id")
"""A session of Claude Code, and the agent in it, which has a conversation of its own."""

SHORT_BYTES = 8 << 10
"""Bodies up to this size may have prompts that a decode worker computes itself, so that no queue
for prefill workers refuses them. Longer ones are refused before they are tokenized."""


async def accept_request(state: RouterState, http: HttpRequest, dialect: Dialect[Body]) -> Response:
    """Read and check a request for generated tokens. Raises ApiError or ClientDisconnected."""
    arrived = time.perf_counter()
    tenant = state.tenants.authenticate(authorization_of(http.headers), "generate")
    record = record_of(http.scope)
    if record is not None:
        record.tenant = tenant.name
    account = state.tenants.open_account(tenant)
    try:
        late_refusal = None
        try:
            account.check_rates()
        except ApiError as error:
            if not dialect.refuses_in_stream:
                raise
            late_refusal = error  # only the body says whether the client streams
        return await _accept(state, http, dialect, account, arrived, late_refusal)
    except ApiError as error:
        account.give_back_prompt()
        error.headers.update(account.headers())
        raise


async def _accept(
    state: RouterState,
    http: HttpRequest,
    dialect: Dialect[Body],
    account: RequestAccount,
    arrived: float,
    late_refusal: ApiError | None,
) -> Response:
    settings, tenant = state.settings, account.tenant
    limits = _admission_limits(http, state.default_limits)
    seen = http.scope.get("state", {})
    request_id, is_own_id = seen.get("request_id", ""), seen.get("own_request_id", False)
    response_id = dialect.id_prefix + (request_id if is_own_id else secrets.token_hex(16))
    with state.bodies.open(tenant.name) as claim:
        raw = await read_json_object(http, settings.max_body_bytes, settings.body_timeout_s, claim)
        parsed = dialect.parse(state.defaults.fill(raw))
    model_name = parsed.generation.model or settings.model_names[0]
    header = ResponseHeader(response_id, int(time.time()), model_name, request_id=request_id)
    try:
        if late_refusal is not None:
            raise late_refusal
        return await _plan_response(state, http, dialect, parsed, account, limits, arrived, header)
    except ApiError as error:
        events = dialect.error_stream(header, parsed, error) if parsed.generation.stream else None
        if events is None:
            raise
        account.give_back_prompt()
        state.metrics.count_request(str(error.status))
        record = record_of(http.scope)
        if record is not None:
            record.refusal = str(error.status)
        headers = {**account.headers(), **ignored_headers(parsed.ignored)}
        return Response(events, 200, headers, STREAM_MEDIA_TYPE)


async def _plan_response(
    state: RouterState,
    http: HttpRequest,
    dialect: Dialect[Body],
    parsed: Body,
    account: RequestAccount,
    limits: AdmissionLimits,
    arrived: float,
    header: ResponseHeader,
) -> GenerationResponse:
    settings, tenant, body = state.settings, account.tenant, parsed.generation
    check_unknown_fields(settings, parsed.ignored, dialect.fields)
    check_served_model(state, body.model)
    tenant.check_priority(body.priority)
    size = announced_bytes(http)
    is_short = size is not None and size <= SHORT_BYTES
    model = _model_with_capacity(state, body, tenant, limits, arrived, is_short=is_short)
    claim = WorkClaim(tenant.name, arrived + limits.ttft_s)
    planned = await dialect.plan(state, parsed, model, claim)
    planned.check_vocabulary(body, model)
    choices = len(planned.prompts) * planned.candidates
    state.admission.check_choices(choices)
    account.take_prompt(sum(map(len, planned.prompts)), choices)
    state.metrics.demand.count_arrived(map(len, planned.prompts), planned.candidates)
    state.admission.check(tenant.name, choices)
    options = ResponseOptions(
        id=header.id,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        arrived=arrived,
        explain=http.headers.get(EXPLAIN_HEADER) == "1",
        timeline=http.headers.get(TIMELINE_HEADER) == "1",
        n=body.n,
        candidates=planned.candidates,
        headers=ignored_headers(parsed.ignored),
    )
    # Workers log the id of the client, too: it need not be unique, so that it is not enough.
    is_same = not header.request_id or header.id == dialect.id_prefix + header.request_id
    work_id = header.id if is_same else f"{header.request_id}/{header.id}"
    requests = _create_requests(state, work_id, body, planned, model, tenant)
    header = header._replace(fingerprint=f"fp_{model.fingerprint[:16]}")
    formatter = planned.new_formatter(header, [request.prompt for request in requests])
    session = _session_digest(tenant, body.prompt_cache_key or _session_name(http))
    streams = await _create_choices(state, options, planned, requests, limits, tenant, session)
    error_response = functools.partial(_error_response, dialect, header, parsed)
    return GenerationResponse(settings, options, formatter, streams, account, error_response)


def _error_response(
    dialect: Dialect[Body], header: ResponseHeader, parsed: Body, error: ApiError
) -> Response:
    """Return the response for an error that came before the first byte."""
    events = dialect.error_stream(header, parsed, error) if parsed.generation.stream else None
    if events is None:
        return dialect.error_response(error, header.request_id)
    return Response(events, 200, error.headers, STREAM_MEDIA_TYPE)


def _model_with_capacity(
    state: RouterState,
    body: GenerationBody,
    tenant: Tenant,
    limits: AdmissionLimits,
    arrived: float,
    *,
    is_short: bool,
) -> ModelInfo:
    """Raises ApiError (503, 429) where the request would be refused whatever its prompts are."""
    model = state.pool.model
    try:
        if model is None or not state.pool.attached:
            raise unavailable("no decode worker is connected; try again shortly")
        state.admission.check(tenant.name)
        waited_s = time.perf_counter() - arrived
        state.dispatcher.check_tenant(tenant, limits, waited_s, is_short=is_short)
    except ApiError:
        state.metrics.demand.count_refused(body.generations)
        raise
    return model


def _admission_limits(http: HttpRequest, default: AdmissionLimits) -> AdmissionLimits:
    """Return the operator's limits, or a client's own deadline where that comes earlier.

    A later deadline changes nothing, and the bound on the queue always holds: a client can give up
    early, but it cannot stay in a queue where others are refused. Raises ApiError (400).
    """
    given = http.headers.get(TTFT_DEADLINE_HEADER)
    if given is None:
        return default
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < math.inf:
        raise invalid(
            f"{TTFT_DEADLINE_HEADER} must be a number of milliseconds above 0, not {given[:80]!r}",
            TTFT_DEADLINE_HEADER,
        )
    return default._replace(ttft_s=min(default.ttft_s, milliseconds / 1000))


def _session_name(http: HttpRequest) -> str | None:
    """Return the name of the session in the headers."""
    own = http.headers.get(SESSION_HEADER)
    if own is not None:
        return own
    session, agent = (http.headers.get(name) for name in CLAUDE_SESSION_HEADERS)
    return f"{session}\0{agent or ''}" if session else None


def _session_digest(tenant: Tenant, key: str | None) -> bytes:
    """Return what identifies a session in this router: keys of two tenants are different ones."""
    if not key:
        return b""
    text = f"{tenant.name}\0{key}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _create_requests(
    state: RouterState,
    work_id: str,
    body: GenerationBody,
    plan: GenerationPlan,
    model: ModelInfo,
    tenant: Tenant,
) -> list[Request]:
    """Return one request for each choice.

    Those of one prompt share a seed and differ in ``choice`` only, so that a prompt among others
    gets what it would get alone. The first of them requests log-probabilities of the prompt.
    """
    salt = body.cache_salt or ""
    secret = state.settings.secret
    root = cache_root(secret, tenant.name, model.fingerprint, model.precision, salt)
    several = len(plan.prompts) * plan.candidates > 1
    others = replace(plan.sampling, prompt_logprobs=None)
    samplings = [plan.sampling]
    samplings += [replace(others, choice=choice) for choice in range(1, plan.candidates)]
    return [
        Request(
            id=f"{work_id}-{place * plan.candidates + choice}" if several else work_id,
            prompt=prompt,
            sampling=sampling,
            cache_root=root,
            priority=body.priority,
        )
        for place, prompt in enumerate(plan.prompts)
        for choice, sampling in enumerate(samplings)
    ]


async def _create_choices(
    state: RouterState,
    options: ResponseOptions,
    plan: GenerationPlan,
    requests: list[Request],
    limits: AdmissionLimits,
    tenant: Tenant,
    session: bytes,
) -> list[ChoiceStream]:
    services, choices, entry = state.routing_services, [], RequestEntry(limits)
    keys, prompt_logprobs = list[bytes](), SharedPromptLogprobs()
    for index, request in enumerate(requests):
        if index % plan.candidates == 0:  # the choices of a prompt share these
            keys = await _block_keys(request)
            prompt_logprobs = SharedPromptLogprobs()
        generation = GenerationRequest(
            request, keys, options.arrived, entry, tenant, options.stream, session
        )
        choices.append(ChoiceStream(services, index, generation, plan.output, prompt_logprobs))
    return choices


async def _block_keys(request: Request) -> list[bytes]:
    """Return the block keys of a prompt. Other requests are served while a long one is hashed."""
    keys: list[bytes] = []
    for part in block_key_parts(request.cache_root, request.prompt):
        keys += part
        if len(part) == KEYS_AT_ONCE:
            await asyncio.sleep(0)
    return keys
