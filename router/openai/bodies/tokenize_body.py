"""Bodies and responses of ``POST /tokenize`` and ``POST /detokenize``, in the forms of vLLM and
llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import PlainValidator, WithJsonSchema

from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.field_types import MAX_PROMPT_IDS, check_id_array
from router.openai.bodies.parsing import (
    CHAT_UNSUPPORTED,
    NeutralValues,
    OpenBody,
    parse_open_body,
)

MAX_TOKEN_STRINGS = 1 << 17
"""Tokens whose texts one response has: each costs some 0.3 us."""


def _check_tokens(value: Any) -> tuple[int, ...]:
    return check_id_array(value, MAX_PROMPT_IDS)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_PROMPT_IDS}
Tokens = Annotated[tuple[int, ...], PlainValidator(_check_tokens), WithJsonSchema(_IDS)]


class TokenizeTextBody(OpenBody):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


TOKENIZE_CHAT_UNSUPPORTED: NeutralValues = {**CHAT_UNSUPPORTED, "truncate_prompt_tokens": ()}
CONTENT_UNSUPPORTED: NeutralValues = {"parse_special": (True,), "with_pieces": (False,)}


class TokenizeContentBody(OpenBody):
    """A text in llama.cpp's form."""

    content: str
    add_special: bool = False


class TokenizeChatBody(ChatBody):
    """A chat, of which only the prompt counts."""

    return_token_strs: bool = False


TokenizeBody = TokenizeTextBody | TokenizeContentBody | TokenizeChatBody
TOKENIZE_FIELDS = frozenset(
    {
        *TokenizeTextBody.model_fields,
        *TokenizeContentBody.model_fields,
        *TokenizeChatBody.model_fields,
    }
)


class DetokenizeBody(OpenBody):
    tokens: Tokens


class TokenizedPrompt(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int | None  # None until a worker has registered
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedPrompt(msgspec.Struct, frozen=True):
    """The text by its name in vLLM, and by that in llama.cpp."""

    prompt: str
    content: str


def parse_tokenize(raw: Mapping[str, Any]) -> TokenizeBody:
    """Return the checked body. Raises ApiError (400)."""
    if raw.get("messages") is not None:
        return parse_open_body(raw, TokenizeChatBody, TOKENIZE_CHAT_UNSUPPORTED)
    if raw.get("prompt") is None and raw.get("content") is not None:
        return parse_open_body(raw, TokenizeContentBody, CONTENT_UNSUPPORTED)
    return parse_open_body(raw, TokenizeTextBody, {})


def parse_detokenize(raw: Mapping[str, Any]) -> DetokenizeBody:
    """Return the checked body. Raises ApiError (400)."""
    return parse_open_body(raw, DetokenizeBody, {})
