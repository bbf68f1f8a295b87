"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from protocol.sampling import MAX_LOGPROBS
from router.api.checks import Integer, about, bad
from router.api.fields import ABSENT, GenerationBody
from router.api.parse import parse
from router.api.unsupported import OF_CHATS
from router.chat.messages import AssistantMessage, Messages
from router.chat.tools import ToolChoice, Tools
from router.json_items import MAX_ITEMS, too_many_items

MAX_LABELS = 16


def _few(value: Any) -> Any:
    """Before pydantic looks at each: it would make an error of each."""
    if isinstance(value, dict) and len(value) > MAX_LABELS:
        raise bad(f"must have at most {MAX_LABELS} entries, not {len(value)}")
    return value


_Label = Annotated[str, Field(max_length=512)]
_Labels = Annotated[dict[_Label, _Label], Field(max_length=MAX_LABELS), BeforeValidator(_few)]


class ChatBody(GenerationBody):
    """A chat request as the client sent it, once checked. Labels (``metadata`` and the like) are
    taken, and nothing depends on them."""

    messages: Messages
    max_completion_tokens: Integer | None = Field(None, ge=1, lt=2**31)  # None: what fits the model
    max_tokens: Integer | None = Field(None, ge=1, lt=2**31)  # its older name
    logprobs: bool = False
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice = ABSENT
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True  # vLLM's, as the next
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    metadata: _Labels | None = None
    prompt_cache_key: _Label | None = None
    safety_identifier: _Label | None = None
    service_tier: Literal["auto", "default"] = "auto"

    @property
    def output_field(self) -> str:
        """The name under which the client may bound the output."""
        old = self.max_completion_tokens is None and self.max_tokens is not None
        return "max_tokens" if old else "max_completion_tokens"

    @property
    def most(self) -> int | None:
        """Output tokens; None: what fits the model."""
        return self.max_tokens if self.output_field == "max_tokens" else self.max_completion_tokens

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        given = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(given) > 1:
            message = "max_tokens is max_completion_tokens by its older name: send one of them"
            raise about("max_tokens", message)
        if self.most is not None and self.min_tokens > self.most:
            message = f"must be at most {self.output_field} ({self.most}), not {self.min_tokens}"
            raise about("min_tokens", f"min_tokens {message}")
        return self

    @model_validator(mode="after")
    def _calls_can_be_decoded(self) -> Self:
        spoken = (m for m in self.messages if isinstance(m, AssistantMessage) and m.tool_calls)
        texts = (call.function.arguments for m in spoken for call in m.tool_calls or ())
        if too_many_items("".join(texts).encode(errors="replace")):
            message = f"hold more than {MAX_ITEMS} strings, arrays and objects in tool calls"
            raise about("messages", f"messages {message}", "body_too_complex")
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise about("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        return self


def parse_chat(raw: Mapping[str, Any]) -> ChatBody:
    """Raises ApiError (400) for the first mistake."""
    return parse(raw, ChatBody, OF_CHATS)
