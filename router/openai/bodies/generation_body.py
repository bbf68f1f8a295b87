"""What completions and chats have in common: sampling, stops, streams, choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from protocol.requests import PRIORITIES
from protocol.sampling_params import MAX_LOGPROBS
from router.common.request_body import MAX_ITEMS, too_many_items
from router.openai.bodies.field_checks import Bias, Integer, Prompts, StopIds, Stops, about, bad
from router.openai.bodies.messages import AssistantMessage, Messages
from router.openai.bodies.output_formats import (
    GUIDED,
    MAX_GRAMMAR_CHARS,
    ResponseFormat,
    StructuredOutputs,
)
from router.openai.bodies.output_formats import MAX_CHOICES as MAX_FORMAT_CHOICES
from router.openai.bodies.parsing import parse, wrong
from router.openai.bodies.strict_types import Strict
from router.openai.bodies.tools import ToolChoice, Tools
from router.openai.bodies.unsupported import OF_CHATS, OF_COMPLETIONS

MAX_CHOICES = 64
ABSENT: Any = None
"""For fields of types that Python cannot join with None."""

Choice = Annotated[str, Field(min_length=1)]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool = False  # OpenAI's padding: accepted, none is ever added


class GenerationBody(Strict):
    """Fields of a request for generated tokens, once checked."""

    model: str
    n: Integer = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Integer = Field(0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    logit_bias: Bias = ()
    min_tokens: Integer = Field(0, ge=0, lt=2**31)
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Integer = Field(0, ge=PRIORITIES[0], le=PRIORITIES[1])  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = None  # a label of the caller's; nothing depends on it
    response_format: ResponseFormat = ABSENT
    structured_outputs: StructuredOutputs | None = None  # vLLM's; ``guided_*`` are its older names
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    guided_choice: list[Choice] | None = Field(None, min_length=1, max_length=MAX_FORMAT_CHOICES)
    guided_grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)

    @property
    def generations(self) -> int:
        """Texts that this asks for."""
        return self.n

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only allowed with stream=true"
            raise about("stream_options", message)
        return self

    @model_validator(mode="after")
    def _one_structure(self) -> Self:
        given = [name for name in GUIDED if getattr(self, name) is not None]
        given += ["structured_outputs"] if self.structured_outputs is not None else []
        if len(given) > 1:
            raise about(given[0], f"{given[0]} is only allowed without {given[1]}")
        try:
            self.structured  # noqa: B018 - an older name is bounded as what it stands for
        except ValidationError as error:
            why = wrong(error.errors(include_url=False)[0])
            raise about(given[0], f"{given[0]} {why}") from None
        return self

    @property
    def structured(self) -> tuple[str, StructuredOutputs | None]:
        """By whichever name it came, and that name."""
        for name, field in GUIDED.items():
            value = getattr(self, name)
            if value is not None:
                return name, StructuredOutputs.model_validate({field: value})
        return "structured_outputs", self.structured_outputs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


# MERGED router.api.chat_body
# The body of ``POST /v1/chat/completions``.

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


# MERGED router.api.completion_body
# The body of ``POST /v1/completions``.

MAX_SEQUENCES = 128
"""Prompts times candidates of one request."""


class CompletionBody(GenerationBody):
    """A completion request as the client sent it, once checked."""

    prompt: Prompts
    max_tokens: Integer = Field(16, ge=0, lt=2**31)
    best_of: Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool = False
    logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS)  # vLLM's
    add_special_tokens: bool = True
    truncate_prompt_tokens: Integer | None = Field(
        None, ge=1, lt=2**31
    )  # the last so many are kept

    @property
    def candidates(self) -> int:
        """Sequences of each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def generations(self) -> int:
        return self.candidates * len(self.prompt)

    @model_validator(mode="after")
    def _some_output(self) -> Self:
        if self.max_tokens < 1 and not self.echo:
            raise about("max_tokens", "max_tokens must be at least 1 without echo, not 0")
        if self.min_tokens > self.max_tokens:
            message = f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            raise about("min_tokens", f"min_tokens {message}")
        return self

    @model_validator(mode="after")
    def _best_of_more(self) -> Self:
        if self.candidates < self.n:
            raise about("best_of", f"best_of must be at least n ({self.n}), not {self.best_of}")
        if self.candidates > self.n and self.stream:
            message = f"best_of must be n ({self.n}) with stream=true, not {self.best_of}"
            raise about("best_of", message)
        if self.generations > MAX_SEQUENCES:
            message = (
                f"prompts times choices must be at most {MAX_SEQUENCES}, not {self.generations}"
            )
            raise about("n" if self.n > 1 else "prompt", message)
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_whole(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is not supported with stream=true; echo with logprobs is"
            raise about("prompt_logprobs", message)
        return self


def parse_completion(raw: Mapping[str, Any]) -> CompletionBody:
    """Raises ApiError (400) for the first mistake."""
    return parse(raw, CompletionBody, OF_COMPLETIONS)
