"""The routes of ``/v1/responses``, ``/v1/responses/input_tokens`` and ``/v1/responses/{id}``.

``RESPONSES`` is the dialect, which ``router.http.intake`` handles like a chat. Nothing is stored,
so that there is no response under any id. ``create_app`` installs the routes.
"""

from __future__ import annotations

import secrets
import time

import msgspec
from fastapi import FastAPI, Request, Response

from protocol.registry.directory import ModelInfo
from router.common.errors import ApiError
from router.common.request_body import ClientDisconnected, read_json_object
from router.common.work_lane import WorkClaim
from router.http.dialect import Dialect, check_served_model, check_unknown_fields
from router.http.generation_plan import GenerationPlan, Prompt, count_chat_tokens, plan_chat
from router.http.state import RouterState
from router.openai.answers.chat_formatter import ChatResponseOptions
from router.openai.answers.formatter import ResponseFormatter, ResponseHeader, TokenNaming
from router.openai.bodies.unknown_fields import ignored_headers
from router.openai.chat.output_plan import OutputPlan
from router.openai.responses.body import KNOWN, ResponsesBody, parse_responses
from router.openai.responses.emitter import ResponsesFormatter, failed_stream
from router.openai.responses.failures import is_told_in_stream
from router.openai.responses.response_json import InputTokens
from router.tenants.key_store import authorization_of

PATH = "/v1/responses"


async def _plan(
    state: RouterState, body: ResponsesBody, model: ModelInfo, claim: WorkClaim
) -> GenerationPlan:
    def new_formatter(
        header: ResponseHeader,
        naming: TokenNaming,
        _options: ChatResponseOptions,
        output: OutputPlan,
        _prompt: Prompt,
    ) -> ResponseFormatter:
        return ResponsesFormatter(header, body, output, naming)

    chat = body.generation
    try:
        return await plan_chat(state, chat, model, claim, new_formatter, "resp_", fits_output=True)
    except ApiError as error:
        raise body.rename(error) from None


def _error_stream(body: ResponsesBody, error: ApiError) -> bytes | None:
    if not is_told_in_stream(error):
        return None
    header = ResponseHeader(
        f"resp_{secrets.token_hex(16)}", int(time.time()), body.generation.model or "", ""
    )
    return failed_stream(header, body, error)


RESPONSES: Dialect[ResponsesBody] = Dialect(
    "response", parse_responses, _plan, KNOWN, error_stream=_error_stream
)


def install_response_routes(app: FastAPI) -> None:
    app.add_api_route(f"{PATH}/input_tokens", input_tokens, methods=["POST"])
    app.add_api_route(f"{PATH}/{{id}}", stored, methods=["GET", "HEAD", "DELETE"])


async def input_tokens(request: Request) -> Response:
    """Count the tokens of a prompt; one that is too long for the model, too."""
    state = request.app.state.router
    assert isinstance(state, RouterState)
    tenant = state.tenants.authenticate(authorization_of(request.headers), "generate")
    arrived, settings = time.perf_counter(), state.settings
    try:
        with state.bodies.open(tenant.name) as claim:
            raw = await read_json_object(
                request, settings.max_body_bytes, settings.body_timeout_s, claim
            )
            body = parse_responses(raw)
    except ClientDisconnected:
        return Response(status_code=499)  # is not sent: the connection is closed
    check_unknown_fields(settings, body.ignored, KNOWN)
    check_served_model(state, body.generation.model)
    work = WorkClaim(tenant.name, arrived + state.default_limits.ttft_s)
    try:
        tokens = await count_chat_tokens(state, body.generation, work)
    except ApiError as error:
        raise body.rename(error) from None
    content, headers = msgspec.json.encode(InputTokens(tokens)), ignored_headers(body.ignored)
    return Response(content, headers=headers, media_type="application/json")


async def stored(request: Request) -> Response:
    """No response is ever found. Raises ApiError (404, or 405 for the path of the count)."""
    state = request.app.state.router
    assert isinstance(state, RouterState)
    state.tenants.authenticate(authorization_of(request.headers))
    response_id = request.path_params["id"]
    if response_id == "input_tokens":
        message = f"{request.method} {PATH}/input_tokens: this path takes POST only"
        raise ApiError(405, message, code="method_not_allowed", headers={"allow": "POST"})
    raise ApiError(
        404,
        f"there is no response {response_id[:80]!r}: this server stores no responses",
        param="response_id",
        code="not_found",
    )
