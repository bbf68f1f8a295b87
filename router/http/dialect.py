"""``Dialect``: how one endpoint for generated tokens reads its bodies and writes its errors.

A dialect of chats turns its body into a ``ChatBody``, the one internal request, so that template,
tools, reasoning and limits are planned in one place (``generation_plan.plan_chat``). The checks
below are made of the bodies of all endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request, Response

from protocol.registry.directory import ModelInfo
from router.common.errors import ApiError
from router.common.request_body import read_json_object
from router.common.work_lane import WorkClaim
from router.http.generation_plan import GenerationPlan, plan_chat, plan_completion
from router.http.state import RouterState
from router.openai.answers.formatter import ResponseHeader
from router.openai.bodies.chat_body import ChatBody, parse_chat
from router.openai.bodies.completion_body import CompletionBody, parse_completion
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.unknown_fields import ignored_headers, unknown_parameter
from router.settings import RouterSettings
from router.tenants.key_store import authorization_of


class RequestBody(Protocol):
    """What ``router.http.intake`` has to know about a body of any dialect."""

    @property
    def generation(self) -> GenerationBody:
        """Return the internal request."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return names of unknown fields."""


class TokenizerRequest(Protocol):
    """What ``read_prompt_request`` has to know about a body that asks for the tokens of a prompt,
    or for the text of tokens."""

    @property
    def model(self) -> str | None:
        """Return the name of the model that was asked for."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return names of unknown fields."""


Body = TypeVar("Body", bound=RequestBody)
Parsed = TypeVar("Parsed", bound=TokenizerRequest)
ParseBody = Callable[[Mapping[str, Any]], Body]
PlanGeneration = Callable[[RouterState, Body, ModelInfo, WorkClaim], Awaitable[GenerationPlan]]


def openai_error(error: ApiError, _request_id: str) -> Response:
    return error.response()


def no_error_stream(_header: ResponseHeader, _body: Any, _error: ApiError) -> bytes | None:
    return None


@dataclass(frozen=True)
class Dialect(Generic[Body]):
    """One endpoint. ``parse`` checks what the body alone can tell, ``plan`` the rest."""

    name: str
    id_prefix: str  # of the ids of its responses
    parse: ParseBody[Body]
    plan: PlanGeneration[Body]
    fields: Collection[str]
    """Names of the fields of a body, of which an error names the one that may be meant."""
    error_response: Callable[[ApiError, str], Response] = openai_error
    """Takes the error and the id of the request."""
    error_stream: Callable[[ResponseHeader, Body, ApiError], bytes | None] = no_error_stream
    """Return the events that report an error after the body was checked, as a whole stream; None:
    an error response does."""

    @property
    def refuses_in_stream(self) -> bool:
        """Return whether a refusal may have to wait for the body."""
        return self.error_stream is not no_error_stream


CHATS: Dialect[ChatBody] = Dialect(
    "chat", "chatcmpl-", parse_chat, plan_chat, ChatBody.model_fields
)
COMPLETIONS: Dialect[CompletionBody] = Dialect(
    "completion", "cmpl-", parse_completion, plan_completion, CompletionBody.model_fields
)


def check_served_model(state: RouterState, name: str | None) -> str:
    """Return the name by which the client knows the model: without one, the model's own. Raises
    ApiError (404) for a model that is not served here."""
    names = state.settings.model_names
    if not name:
        return names[0]
    if name not in names:
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist; this server has {names[0]!r}",
            param="model",
            code="model_not_found",
        )
    return name


async def read_prompt_request(
    http: Request, parse: Callable[[Mapping[str, Any]], Parsed], fields: Collection[str]
) -> tuple[RouterState, Parsed, WorkClaim]:
    """Return the checked body of a request that needs no worker; ``fields``: names of which an
    error names the one that may be meant. Raises ApiError or ClientDisconnected."""
    state = http.app.state.router
    assert isinstance(state, RouterState)
    settings = state.settings
    tenant = state.tenants.authenticate(authorization_of(http.headers), "generate")
    claim = WorkClaim(tenant.name, time.perf_counter() + state.default_limits.ttft_s)
    with state.bodies.open(tenant.name) as memory:
        body = parse(
            await read_json_object(http, settings.max_body_bytes, settings.body_timeout_s, memory)
        )
    check_unknown_fields(settings, body.ignored, fields)
    check_served_model(state, body.model)
    return state, body, claim


def prompt_response(value: object, body: TokenizerRequest) -> Response:
    """Return the answer to ``read_prompt_request``."""
    content, headers = msgspec.json.encode(value), ignored_headers(body.ignored)
    return Response(content, headers=headers, media_type="application/json")


def check_unknown_fields(
    settings: RouterSettings, unknown: tuple[str, ...], known: Collection[str]
) -> None:
    """Raises ApiError (400) for unknown fields where the configuration refuses them."""
    if unknown and settings.unknown_fields == "refuse":
        raise unknown_parameter(unknown[0], unknown[0], known)
