"""The routes of ``/v1/responses``, ``/v1/responses/input_tokens`` and ``/v1/responses/{id}``.

``RESPONSES`` is the dialect, which ``router.http.intake`` handles like a chat. Nothing is stored,
so that there is no response under any id. ``create_app`` installs the routes.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from protocol.registry.directory import ModelInfo
from router.common.errors import ApiError
from router.common.work_lane import WorkClaim
from router.http.dialect import Dialect, prompt_response, read_prompt_request
from router.http.generation_plan import GenerationPlan, Prompt, count_chat_tokens, plan_chat
from router.http.state import RouterState
from router.openai.answers.chat_formatter import ChatResponseOptions
from router.openai.answers.formatter import ResponseFormatter, ResponseHeader, TokenNaming
from router.openai.chat.output_plan import OutputPlan
from router.openai.responses.body import RESPONSES_FIELDS, ResponsesBody, parse_responses
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
        return await plan_chat(state, chat, model, claim, new_formatter, fits_output=True)
    except ApiError as error:
        raise body.rename(error) from None


def _error_stream(header: ResponseHeader, body: ResponsesBody, error: ApiError) -> bytes | None:
    return failed_stream(header, body, error) if is_told_in_stream(error) else None


RESPONSES: Dialect[ResponsesBody] = Dialect(
    "response", "resp_", parse_responses, _plan, RESPONSES_FIELDS.known, error_stream=_error_stream
)


def install_response_routes(app: FastAPI) -> None:
    app.add_api_route(f"{PATH}/input_tokens", input_tokens, methods=["POST"])
    app.add_api_route(f"{PATH}/{{id}}", stored, methods=["GET", "HEAD", "DELETE"])


async def input_tokens(request: Request) -> Response:
    """Count the tokens of a prompt; one that is too long for the model, too."""
    state, body, claim = await read_prompt_request(request, parse_responses, RESPONSES_FIELDS.known)
    try:
        tokens = await count_chat_tokens(state, body.generation, claim)
    except ApiError as error:
        raise body.rename(error) from None
    return prompt_response(InputTokens(tokens), body)


async def stored(request: Request) -> Response:
    """No response is ever found. Raises ApiError (404, or 405 for the path of the count)."""
    state = request.app.state.router
    assert isinstance(state, RouterState)
    state.tenants.authenticate(authorization_of(request.headers))
    response_id = request.path_params["id"]
    if response_id == "input_tokens":
        message = f"{request.method} {PATH}/input_tokens: this path accepts only POST"
        raise ApiError(405, message, code="method_not_allowed", headers={"allow": "POST"})
    raise ApiError(
        404,
        f"there is no response {response_id[:80]!r}: this server stores no responses",
        param="response_id",
        code="not_found",
    )
