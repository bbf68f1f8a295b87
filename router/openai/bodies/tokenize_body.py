"""Bodies and responses of ``POST /tokenize`` and ``POST /detokenize``, in the forms of vLLM and
llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import PlainValidator, WithJsonSchema

from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.field_types import MAX_PROMPT_IDS, StrictModel, check_id_array
from router.openai.bodies.parsing import CHAT_UNSUPPORTED, NeutralValues, parse_body
from router.openai.bodies.unknown_fields import unknown_names

MAX_TOKEN_STRINGS = 1 << 17
"""Tokens whose texts one response has: each costs some 0.3 us."""


def _check_tokens(value: Any) -> tuple[int, ...]:
    return check_id_array(value, MAX_PROMPT_IDS)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_PROMPT_IDS}
Tokens = Annotated[tuple[int, ...], PlainValidator(_check_tokens), WithJsonSchema(_IDS)]


class TokenizeTextBody(StrictModel):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


TOKENIZE_CHAT_UNSUPPORTED: NeutralValues = {**CHAT_UNSUPPORTED, "truncate_prompt_tokens": ()}
CONTENT_UNSUPPORTED: NeutralValues = {"parse_special": (True,), "with_pieces": (False,)}


class TokenizeContentBody(StrictModel):
    """A text in llama.cpp's form."""

    content: str
    model: str | None = None
    add_special: bool = False


class TokenizeChatBody(ChatBody):
    """A chat, of which only the prompt counts."""

    return_token_strs: bool = False


TokenizeBody = TokenizeTextBody | TokenizeContentBody | TokenizeChatBody


class DetokenizeBody(StrictModel):
    tokens: Tokens
    model: str | None = None


class TokenizedPrompt(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int | None  # None until a worker has registered
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedPrompt(msgspec.Struct, frozen=True):
    """The text by its name in vLLM, and by that in llama.cpp."""

    prompt: str
    content: str


def parse_tokenize(raw: Mapping[str, Any]) -> tuple[TokenizeBody, tuple[str, ...]]:
    """Return the checked body and the names of unknown fields. Raises ApiError (400)."""
    if raw.get("messages") is not None:
        known = {*TokenizeChatBody.model_fields, *TOKENIZE_CHAT_UNSUPPORTED}
        body = parse_body(raw, TokenizeChatBody, TOKENIZE_CHAT_UNSUPPORTED)
        return body, unknown_names(raw, known)
    if raw.get("prompt") is None and raw.get("content") is not None:
        known = {*TokenizeContentBody.model_fields, *CONTENT_UNSUPPORTED}
        return parse_body(raw, TokenizeContentBody, CONTENT_UNSUPPORTED), unknown_names(raw, known)
    names = unknown_names(raw, TokenizeTextBody.model_fields)
    return parse_body(raw, TokenizeTextBody, {}), names


def parse_detokenize(raw: Mapping[str, Any]) -> tuple[DetokenizeBody, tuple[str, ...]]:
    """Return the checked body and the names of unknown fields. Raises ApiError (400)."""
    return parse_body(raw, DetokenizeBody, {}), unknown_names(raw, DetokenizeBody.model_fields)
