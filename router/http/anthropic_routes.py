"""The routes of Anthropic's API: ``/v1/messages``, ``/v1/messages/count_tokens``, ``/api/hello``.

``MESSAGES`` is the dialect of ``/v1/messages``, which ``router.http.intake`` handles like a chat.
``create_app`` installs the routes, and ``write_error`` for the errors of all paths.
"""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from protocol.registry.directory import ModelInfo
from router.anthropic.body import (
    MessagesBody,
    MessagesRequest,
    PromptBody,
    parse_count,
    parse_messages,
    with_own_fields,
)
from router.anthropic.errors import error_response
from router.anthropic.formatter import MessageFormatter
from router.anthropic.wire import TokenCount, encode
from router.common.errors import ApiError, write_openai_error
from router.common.request_body import ClientDisconnected, read_json_object
from router.common.work_lane import WorkClaim
from router.http.dialect import Dialect, check_served_model, check_unknown_fields
from router.http.generation_plan import GenerationPlan, Prompt, count_chat_tokens, plan_chat
from router.http.state import RouterState
from router.openai.answers.chat_formatter import ChatResponseOptions
from router.openai.answers.formatter import ResponseFormatter, ResponseHeader, TokenNaming
from router.openai.bodies.unknown_fields import ignored_headers
from router.openai.chat.output_plan import OutputPlan
from router.tenants.key_store import authorization_of

PATH = "/v1/messages"


def write_error(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error in the format of the request's path."""
    path = scope["path"]
    if path != PATH and not path.startswith(f"{PATH}/"):
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
        return await plan_chat(state, chat, model, claim, new_formatter, "msg_", fits_output=True)
    except ApiError as error:
        raise with_own_fields(error) from None


MESSAGES: Dialect[MessagesRequest] = Dialect(
    "message", parse_messages, _plan, MessagesBody.model_fields, error_response
)


def install_message_routes(app: FastAPI) -> None:
    app.add_api_route(f"{PATH}/count_tokens", count_tokens, methods=["POST"])
    app.add_api_route("/api/hello", hello, methods=["GET", "HEAD"])


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt; one that is too long for the model, too."""
    state = request.app.state.router
    assert isinstance(state, RouterState)
    tenant = state.tenants.authenticate(authorization_of(request.headers), "generate")
    arrived, settings = time.perf_counter(), state.settings
    try:
        with state.bodies.open(tenant.name) as body:
            raw = await read_json_object(
                request, settings.max_body_bytes, settings.body_timeout_s, body
            )
            parsed = parse_count(raw)
    except ClientDisconnected:
        return Response(status_code=499)  # is not sent: the connection is closed
    check_unknown_fields(settings, parsed.ignored, PromptBody.model_fields)
    check_served_model(state, parsed.chat.model)
    claim = WorkClaim(tenant.name, arrived + state.default_limits.ttft_s)
    try:
        tokens = await count_chat_tokens(state, parsed.chat, claim)
    except ApiError as error:
        raise with_own_fields(error) from None
    headers = ignored_headers(parsed.ignored)
    return Response(encode(TokenCount(tokens)), headers=headers, media_type="application/json")


async def hello() -> Response:
    """This server can be reached: Claude Code asks before its first request. Its versions differ in
    the path."""
    return Response(b"{}", media_type="application/json")
