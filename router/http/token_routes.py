"""``POST /tokenize`` and ``POST /detokenize``: what a prompt is in tokens, and back.

Both answer without a worker. Prompts are encoded like those of requests for generated tokens
(``PromptEncoder``), with the same bounds. ``create_app`` installs the routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from router.common.errors import invalid
from router.common.request_body import ClientDisconnected, read_json_object
from router.common.work_lane import WorkClaim
from router.http.dialect import check_served_model, check_unknown_fields
from router.http.generation_plan import chat_tokens
from router.http.state import RouterState
from router.openai.bodies.field_types import MAX_PROMPT_IDS
from router.openai.bodies.tokenize_body import (
    MAX_TOKEN_STRINGS,
    DetokenizeBody,
    DetokenizedPrompt,
    TokenizeBody,
    TokenizeContentBody,
    TokenizedPrompt,
    TokenizeTextBody,
    parse_detokenize,
    parse_tokenize,
)
from router.openai.bodies.unknown_fields import ignored_headers
from router.openai.prompts.prompt_encoder import TokenLimit
from router.tenants.key_store import authorization_of

_SHORT = 4096  # tokens that are named in some 1 ms

Body = TypeVar("Body", TokenizeBody, DetokenizeBody)
Parse = Callable[[Mapping[str, Any]], tuple[Body, tuple[str, ...]]]


def install_token_routes(app: FastAPI) -> None:
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


async def tokenize(request: Request) -> Response:
    state = _state(request)
    claim = _claim(state, request)
    try:
        body, ignored = await _read(state, request, claim, parse_tokenize)
    except ClientDisconnected:
        return _disconnected()
    names, encode = None, state.formats.prompts.encode_text
    if isinstance(body, TokenizeContentBody):
        limit, special = _limit("content"), body.add_special
        ids = await encode(body.content, limit, claim, special=special, field="content")
    else:
        if isinstance(body, TokenizeTextBody):
            special = body.add_special_tokens
            ids = await encode(body.prompt, _limit("prompt"), claim, special=special)
        else:
            ids = await chat_tokens(state, body, claim, _limit("messages"))
        names = await _token_strings(state, ids) if body.return_token_strs else None
    known = state.pool.model
    longest = None if known is None else known.max_model_len
    return _json(TokenizedPrompt(len(ids), longest, ids, names), ignored)


async def detokenize(request: Request) -> Response:
    state = _state(request)
    claim = _claim(state, request)
    try:
        body, ignored = await _read(state, request, claim, parse_detokenize)
    except ClientDisconnected:
        return _disconnected()
    known, tokenizer = state.pool.model, state.vocabulary.tokenizer
    size = tokenizer.get_vocab_size() if known is None else known.vocab_size
    highest = max(body.tokens, default=0)
    if highest >= size:
        message = f"tokens holds token id {highest}; the vocabulary ends at {size - 1}"
        raise invalid(message, "tokens")
    text = await state.formats.prompts.decode(body.tokens, claim)
    return _json(DetokenizedPrompt(text, text), ignored)


def _state(request: Request) -> RouterState:
    state = request.app.state.router
    assert isinstance(state, RouterState)
    return state


def _claim(state: RouterState, request: Request) -> WorkClaim:
    """Return the claim of an authenticated tenant. Raises ApiError (401, 403)."""
    tenant = state.tenants.authenticate(authorization_of(request.headers), "generate")
    return WorkClaim(tenant.name, time.perf_counter() + state.default_limits.ttft_s)


async def _read(
    state: RouterState, request: Request, claim: WorkClaim, parse: Parse[Body]
) -> tuple[Body, tuple[str, ...]]:
    """Return the checked body and the names of its unknown fields. Raises ApiError or
    ClientDisconnected."""
    settings = state.settings
    with state.bodies.open(claim.tenant) as memory:
        body, ignored = parse(
            await read_json_object(
                request, settings.max_body_bytes, settings.body_timeout_s, memory
            )
        )
    known: Collection[str] = type(body).model_fields
    check_unknown_fields(settings, ignored, known)
    check_served_model(state, body.model)
    return body, ignored


def _limit(field: str) -> TokenLimit:
    def check(count: int, at_least: bool) -> None:
        if count > MAX_PROMPT_IDS:
            counted = f"at least {count}" if at_least else f"{count}"
            message = f"{field} has {counted} tokens; at most {MAX_PROMPT_IDS} are returned"
            raise invalid(message, field)

    return TokenLimit(MAX_PROMPT_IDS, check)


async def _token_strings(state: RouterState, ids: list[int]) -> list[str]:
    """Return the tokens as the vocabulary writes them. Raises ApiError (400) for too many."""
    if len(ids) > MAX_TOKEN_STRINGS:
        message = f"return_token_strs: at most {MAX_TOKEN_STRINGS} tokens are named, not {len(ids)}"
        raise invalid(message, "return_token_strs")
    name_of = state.vocabulary.tokenizer.id_to_token

    def names() -> list[str]:
        return [name_of(token) or "" for token in ids]

    return names() if len(ids) <= _SHORT else await asyncio.to_thread(names)


def _json(value: object, ignored: tuple[str, ...]) -> Response:
    content = msgspec.json.encode(value)
    return Response(content, headers=ignored_headers(ignored), media_type="application/json")


def _disconnected() -> Response:
    return Response(status_code=499)  # is not sent: the connection is closed
