"""``POST /tokenize`` and ``POST /detokenize``: what a prompt is in tokens, and back.

Both answer without a worker. Prompts are encoded like those of requests for generated tokens
(``PromptEncoder``), with the same bounds. ``create_app`` installs the routes.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from router.common.errors import invalid
from router.http.dialect import prompt_response, read_prompt_request
from router.http.generation_plan import chat_tokens
from router.http.state import RouterState
from router.openai.bodies.field_types import MAX_PROMPT_IDS
from router.openai.bodies.tokenize_body import (
    MAX_TOKEN_STRINGS,
    TOKENIZE_FIELDS,
    DetokenizeBody,
    DetokenizedPrompt,
    TokenizeContentBody,
    TokenizedPrompt,
    TokenizeTextBody,
    parse_detokenize,
    parse_tokenize,
)
from router.openai.prompts.prompt_encoder import TokenLimit

_SHORT = 4096  # tokens that are named in some 1 ms


def install_token_routes(app: FastAPI) -> None:
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


async def tokenize(request: Request) -> Response:
    state, body, claim = await read_prompt_request(request, parse_tokenize, TOKENIZE_FIELDS)
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
    return prompt_response(TokenizedPrompt(len(ids), longest, ids, names), body)


async def detokenize(request: Request) -> Response:
    fields = DetokenizeBody.model_fields
    state, body, claim = await read_prompt_request(request, parse_detokenize, fields)
    known, tokenizer = state.pool.model, state.vocabulary.tokenizer
    size = tokenizer.get_vocab_size() if known is None else known.vocab_size
    highest = max(body.tokens, default=0)
    if highest >= size:
        message = f"tokens holds token id {highest}; the vocabulary ends at {size - 1}"
        raise invalid(message, "tokens")
    text = await state.formats.prompts.decode(body.tokens, claim)
    return prompt_response(DetokenizedPrompt(text, text), body)


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
