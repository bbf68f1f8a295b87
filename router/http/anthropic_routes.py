"""The routes of Anthropic's API: ``/v1/messages``, ``/v1/messages/count_tokens``, ``/api/hello``.

``MESSAGES`` is the dialect of ``/v1/messages``, which ``router.http.intake`` handles like a chat.
``create_app`` installs the routes, and ``write_error`` for the errors of all paths.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from protocol.registry.directory import ModelInfo
from router.anthropic.body import (
    MESSAGES_FIELDS,
    MessagesRequest,
    PromptBody,
    parse_count,
    parse_messages,
)
from router.anthropic.errors import error_response
from router.anthropic.formatter import MessageFormatter
from router.anthropic.models import VERSION_HEADER
from router.anthropic.wire import TokenCount
from router.common.errors import ApiError, write_openai_error
from router.common.work_lane import WorkClaim
from router.http.dialect import Dialect, prompt_response, read_prompt_request
from router.http.generation_plan import GenerationPlan, Prompt, count_chat_tokens, plan_chat
from router.http.state import RouterState
from router.openai.answers.chat_formatter import ChatResponseOptions
from router.openai.answers.formatter import ResponseFormatter, ResponseHeader, TokenNaming
from router.openai.chat.output_plan import OutputPlan

PATH = "/v1/messages"
MODELS_PATH = "/v1/models"


def write_error(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error in the format of the request's path and client."""
    path = scope["path"]
    has_own_path = path == PATH or path.startswith(f"{PATH}/")
    asks_for_models = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    if not has_own_path and not (asks_for_models and VERSION_HEADER in Headers(scope=scope)):
        return write_openai_error(scope, error)
    return error_response(error, scope.get("state", {}).get("request_id", ""))


async def _plan(
    state: RouterState, request: MessagesRequest, model: ModelInfo, claim: WorkClaim
) -> GenerationPlan:
    def new_formatter(
        header: ResponseHeader,
        _naming: TokenNaming,
        _options: ChatResponseOptions,
        output: OutputPlan,
        prompt: Prompt,
    ) -> ResponseFormatter:
        return MessageFormatter(header, output, len(prompt), request.long_names)

    chat = request.chat
    try:
        return await plan_chat(state, chat, model, claim, new_formatter, fits_output=True)
    except ApiError as error:
        raise request.rename(error) from None


MESSAGES: Dialect[MessagesRequest] = Dialect(
    "message", "msg_", parse_messages, _plan, MESSAGES_FIELDS.known, error_response
)


def install_message_routes(app: FastAPI) -> None:
    app.add_api_route(f"{PATH}/count_tokens", count_tokens, methods=["POST"])
    app.add_api_route("/api/hello", hello, methods=["GET", "HEAD"])


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt; one that is too long for the model, too."""
    state, body, claim = await read_prompt_request(request, parse_count, PromptBody.model_fields)
    try:
        tokens = await count_chat_tokens(state, body.chat, claim)
    except ApiError as error:
        raise body.rename(error) from None
    return prompt_response(TokenCount(tokens), body)


async def hello() -> Response:
    """This server can be reached: Claude Code asks before its first request. Its versions differ in
    the path."""
    return Response(b"{}", media_type="application/json")
