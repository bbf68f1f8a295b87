"""``Dialect``: how one endpoint for generated tokens reads its bodies and writes its errors.

A dialect of chats turns its body into a ``ChatBody``, the one internal request, so that template,
tools, reasoning and limits are planned in one place (``generation_plan.plan_chat``). The checks
below are made of the bodies of all endpoints.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Response

from protocol.registry.directory import ModelInfo
from router.common.errors import ApiError
from router.common.work_lane import WorkClaim
from router.http.generation_plan import GenerationPlan, plan_chat, plan_completion
from router.http.state import RouterState
from router.openai.bodies.chat_body import ChatBody, parse_chat
from router.openai.bodies.completion_body import CompletionBody, parse_completion
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.unknown_fields import unknown_parameter
from router.settings import RouterSettings


class RequestBody(Protocol):
    """What ``router.http.intake`` has to know about a body of any dialect."""

    @property
    def generation(self) -> GenerationBody:
        """Return the internal request."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return names of unknown fields."""


Body = TypeVar("Body", bound=RequestBody)
ParseBody = Callable[[Mapping[str, Any]], Body]
PlanGeneration = Callable[[RouterState, Body, ModelInfo, WorkClaim], Awaitable[GenerationPlan]]


def openai_error(error: ApiError, _request_id: str) -> Response:
    return error.response()


def no_error_stream(_body: Any, _error: ApiError) -> bytes | None:
    return None


@dataclass(frozen=True)
class Dialect(Generic[Body]):
    """One endpoint. ``parse`` checks what the body alone can tell, ``plan`` the rest."""

    name: str
    parse: ParseBody[Body]
    plan: PlanGeneration[Body]
    fields: Collection[str]
    """Names of the fields of a body, of which an error names the one that may be meant."""
    error_response: Callable[[ApiError, str], Response] = openai_error
    """Takes the error and the id of the request."""
    error_stream: Callable[[Body, ApiError], bytes | None] = no_error_stream
    """Return the events that report an error after the body was checked, as a whole stream; None:
    an error response does."""

    @property
    def refuses_in_stream(self) -> bool:
        """Return whether a refusal may have to wait for the body."""
        return self.error_stream is not no_error_stream


CHATS: Dialect[ChatBody] = Dialect("chat", parse_chat, plan_chat, ChatBody.model_fields)
COMPLETIONS: Dialect[CompletionBody] = Dialect(
    "completion", parse_completion, plan_completion, CompletionBody.model_fields
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


def check_unknown_fields(
    settings: RouterSettings, unknown: tuple[str, ...], known: Collection[str]
) -> None:
    """Raises ApiError (400) for unknown fields where the configuration refuses them."""
    if unknown and settings.unknown_fields == "refuse":
        raise unknown_parameter(unknown[0], unknown[0], known)
