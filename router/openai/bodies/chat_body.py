"""The body of ``POST /v1/chat/completions``: the internal request of all dialects of chats.

``ChatDialect`` says how the bodies of other dialects take the fields of chats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, create_model, model_validator

from protocol.sampling_params import MAX_LOGPROBS
from router.common.errors import ApiError
from router.common.request_body import MAX_ITEMS, too_many_items
from router.openai.bodies.field_types import Integer, body_error, field_error
from router.openai.bodies.generation_body import ABSENT, GenerationBody, with_max_tokens
from router.openai.bodies.messages import AssistantMessage, Messages
from router.openai.bodies.parsing import (
    CHAT_UNSUPPORTED,
    NeutralValues,
    check_unsupported,
    parse_open_body,
)
from router.openai.bodies.reasoning_options import ReasoningEffort, ReasoningOptions
from router.openai.bodies.tools import ToolChoice, Tools

MAX_LABELS = 16


def _check_label_count(value: Any) -> Any:
    """Check the number before pydantic does: it would create an error for each label."""
    if isinstance(value, dict) and len(value) > MAX_LABELS:
        raise field_error(f"must have at most {MAX_LABELS} entries, not {len(value)}")
    return value


_Label = Annotated[str, Field(max_length=512)]
_Labels = Annotated[
    dict[_Label, _Label], Field(max_length=MAX_LABELS), BeforeValidator(_check_label_count)
]


class ChatBody(GenerationBody):
    """A checked chat request. Labels (``metadata`` and the like) are accepted and have no
    effect."""

    messages: Messages
    max_completion_tokens: Integer | None = Field(None, ge=1, lt=2**31)  # None: what fits the model
    max_tokens: Integer | None = Field(None, ge=1, lt=2**31)  # older name
    logprobs: bool = False
    top_logprobs: Integer | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # -1: vLLM's, all tokens
    prompt_logprobs: Integer | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # vLLM's
    tools: Tools | None = None
    tool_choice: ToolChoice = ABSENT
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True  # vLLM's, as the next two
    continue_final_message: bool = False  # the prompt ends within the last message
    echo: bool = False  # the answer begins with the assistant's message that it continues
    add_special_tokens: bool = False  # vLLM's: also those that the template may have written
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True  # vLLM's, as the next
    thinking_token_budget: int | None = Field(None, ge=-1, lt=2**31)  # -1: any number
    metadata: _Labels | None = None
    safety_identifier: _Label | None = None
    store: bool = False  # nothing is ever stored
    prompt_cache_retention: _Label | None = None

    @property
    def reasoning(self) -> ReasoningOptions:
        budget = self.thinking_token_budget
        return ReasoningOptions(
            hidden=not self.include_reasoning,
            budget=None if budget == -1 else budget,
            is_over=self.continue_final_message,
        )

    @property
    def adds_generation_prompt(self) -> bool:
        return self.add_generation_prompt and not self.continue_final_message

    @property
    def echoed_text(self) -> str:
        """Return the text with which the answer begins."""
        last = self.messages[-1]
        continued = isinstance(last, AssistantMessage) and not self.adds_generation_prompt
        return last.content or "" if self.echo and continued else ""

    @property
    def output_field(self) -> str:
        """Return the name of the field that bounds the output."""
        old = self.max_completion_tokens is None and self.max_tokens is not None
        return "max_tokens" if old else "max_completion_tokens"

    @property
    def max_output_tokens(self) -> int | None:
        """Return the bound on output tokens; None: as many as fit the model."""
        return self.max_tokens if self.output_field == "max_tokens" else self.max_completion_tokens

    @model_validator(mode="after")
    def _one_end_of_prompt(self) -> Self:
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            message = "continue_final_message is only allowed with add_generation_prompt=false"
            raise body_error("continue_final_message", message)
        return self

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        given = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(given) > 1:
            message = "max_tokens is max_completion_tokens by its older name: send one of them"
            raise body_error("max_tokens", message)
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            bound = f"{self.output_field} ({self.max_output_tokens})"
            message = f"min_tokens must be at most {bound}, not {self.min_tokens}"
            raise body_error("min_tokens", message)
        return self

    @model_validator(mode="after")
    def _calls_can_be_decoded(self) -> Self:
        calling = (m for m in self.messages if isinstance(m, AssistantMessage) and m.tool_calls)
        texts = (call.function.arguments for m in calling for call in m.tool_calls or ())
        if too_many_items("".join(texts).encode(errors="replace")):
            message = f"hold more than {MAX_ITEMS} strings, arrays and objects in tool calls"
            raise body_error("messages", f"messages {message}", "body_too_complex")
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise body_error("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        if self.logprob_token_ids and not self.logprobs:
            message = "logprob_token_ids is only allowed with logprobs=true"
            raise body_error("logprob_token_ids", message)
        if self.prompt_logprobs and self.stream:
            message = "prompt_logprobs is not supported with stream=true"
            raise body_error("prompt_logprobs", message)
        return self


def parse_chat(raw: Mapping[str, Any]) -> ChatBody:
    """Return the checked body. Raises ApiError (400) for the first mistake."""
    raw = with_max_tokens(raw, "max_completion_tokens", least=1, unlimited=True)
    return parse_open_body(raw, ChatBody, CHAT_UNSUPPORTED)


CHAT_ONLY: NeutralValues = {
    "echo": (False,),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "n_predict": (),
    "parallel_tool_calls": (True,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "top_logprobs": (0,),
}
"""Parameters of chats that other dialects write in another way, or whose answers cannot show what
they ask for. A dialect that has one of them itself does not refuse it."""

_WITHOUT_EFFECT = (
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store"),
    *("stream_options", "user"),
)
_FIXED_TEXT = ("context_length_exceeded", "min_tokens")
"""Codes and fields of errors whose text holds nothing that the client has sent."""


class ChatDialect:
    """How a body other than ``ChatBody`` takes the fields of chats. One instance per dialect.

        a field of the dialect      read by the dialect
        a field without effect      left out
        a field that is refused     400, unless its value changes nothing
        another field of a chat     means what it means there
        any other name              ignored, and named for the client

    ``renamed``: field of a chat -> the dialect's own, which an error names instead.
    """

    def __init__(
        self,
        own: Collection[str],
        renamed: Mapping[str, str],
        refused: NeutralValues,
        without_effect: Collection[str],
    ) -> None:
        shared = {**CHAT_UNSUPPORTED, **CHAT_ONLY}
        self.refused = {n: values for n, values in shared.items() if n not in own} | {**refused}
        self.without_effect = frozenset([*_WITHOUT_EFFECT, *without_effect])
        apart = {*own, *self.refused, *self.without_effect}
        self.passed = [name for name in ChatBody.model_fields if name not in apart]
        self.known = frozenset([*apart, *self.passed])
        self.renamed = renamed
        self._why = {name: f"use {other}" for name, other in renamed.items()}
        self._names = re.compile(rf"(?<![.\w])({'|'.join(renamed)})\b(\.json_schema\b)?")

    def chat_fields(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that mean what they mean in chats. Raises ApiError (400) for the first
        field that is refused."""
        given = {name: value for name, value in raw.items() if value is not None}
        check_unsupported(given, self.refused, self._why)
        return {name: given[name] for name in self.passed if name in given}

    def documented(self, own: type[BaseModel], name: str) -> type[BaseModel]:
        """Return the model ``own`` with the fields of ``chat_fields``, for the OpenAPI document."""
        found = {field: ChatBody.model_fields[field] for field in self.passed}
        fields: dict[str, Any] = {field: (one.annotation, one) for field, one in found.items()}
        return create_model(name, __base__=own, **fields)

    def rename(self, text: str) -> str:
        """Return the text with the dialect's own names of fields."""
        return self._names.sub(lambda found: self.renamed[found[1]], text)


def rename_error(error: ApiError, rename: Callable[[str], str]) -> ApiError:
    """Return the error of a chat with the names of fields that the client knows."""
    if error.param is None:
        return error
    # Only names in front of most messages are surely not the client's own text.
    head, gap, tail = error.message.partition(" ")
    if error.code in _FIXED_TEXT or error.param in _FIXED_TEXT:
        tail = rename(tail)
    return ApiError(
        error.status,
        rename(head) + gap + tail,
        type=error.type,
        param=rename(error.param),
        code=error.code,
        headers=error.headers,
        overflow=error.overflow,
    )
