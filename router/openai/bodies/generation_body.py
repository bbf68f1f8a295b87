"""The bodies of ``POST /v1/completions`` and ``POST /v1/chat/completions``, with what they
share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from protocol.requests import PRIORITIES
from protocol.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from router.common.request_body import MAX_ITEMS, too_many_items
from router.openai.bodies.field_types import (
    AllowedTokenIds,
    Integer,
    LogitBias,
    LogprobTokenIds,
    Prompts,
    StopStrings,
    StopTokenIds,
    StrictModel,
    body_error,
    field_error,
)
from router.openai.bodies.messages import AssistantMessage, Messages
from router.openai.bodies.output_formats import (
    GUIDED_FIELDS,
    MAX_FORMAT_CHOICES,
    MAX_GRAMMAR_CHARS,
    ResponseFormat,
    StructuredOutputs,
)
from router.openai.bodies.parsing import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    describe_mistake,
    parse_body,
)
from router.openai.bodies.reasoning_options import ReasoningEffort, ReasoningOptions
from router.openai.bodies.tools import ToolChoice, Tools

MAX_CHOICES = 64
MAX_LABELS = 16
MAX_SEQUENCES = 128
"""Prompts times candidates of one completion request."""
ABSENT: Any = None
"""Default of optional fields whose type alias cannot be joined with None."""

ChoiceText = Annotated[str, Field(min_length=1)]


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool = False  # OpenAI's padding: accepted, none is ever added


class GenerationBody(StrictModel):
    """Checked fields that completions and chats share."""

    model: str
    n: Integer = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Integer = Field(0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    logit_bias: LogitBias = ()
    allowed_token_ids: AllowedTokenIds = ()  # vLLM's: no other token is drawn
    logprob_token_ids: LogprobTokenIds = ()  # vLLM's: report these, not the most likely ones
    min_tokens: Integer = Field(0, ge=0, lt=2**31)
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Integer = Field(0, ge=PRIORITIES[0], le=PRIORITIES[1])  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    prompt_cache_key: str | None = Field(None, max_length=512)  # a session's name
    user: str | None = None  # a label of the client; has no effect
    response_format: ResponseFormat = ABSENT
    structured_outputs: StructuredOutputs | None = None  # vLLM's; ``guided_*`` are its older names
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    guided_choice: list[ChoiceText] | None = Field(
        None, min_length=1, max_length=MAX_FORMAT_CHOICES
    )
    guided_grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)

    @property
    def generation(self) -> GenerationBody:
        """Return the internal request, which this body is itself."""
        return self

    @property
    def generations(self) -> int:
        """Return the number of sequences to generate."""
        return self.n

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only allowed with stream=true"
            raise body_error("stream_options", message)
        return self

    @model_validator(mode="after")
    def _one_structure(self) -> Self:
        given = [name for name in GUIDED_FIELDS if getattr(self, name) is not None]
        given += ["structured_outputs"] if self.structured_outputs is not None else []
        if len(given) > 1:
            raise body_error(given[0], f"{given[0]} is only allowed without {given[1]}")
        try:
            self.structured  # noqa: B018 - validates a value that came by an older name
        except ValidationError as error:
            why = describe_mistake(error.errors(include_url=False)[0])
            raise body_error(given[0], f"{given[0]} {why}") from None
        return self

    @property
    def structured(self) -> tuple[str, StructuredOutputs | None]:
        """Return the name by which the constraint was sent, and its value."""
        for name, field in GUIDED_FIELDS.items():
            value = getattr(self, name)
            if value is not None:
                return name, StructuredOutputs.model_validate({field: value})
        return "structured_outputs", self.structured_outputs

    def sampling_params(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        grammar: str = "",
    ) -> SamplingParams:
        """Return the sampling parameters of each choice. The arguments are the fields that follow
        from more than one field of the body; a body without a seed gets a random one."""
        fields = {
            name: getattr(self, name)
            for name in SamplingParams.__struct_fields__
            if name in GenerationBody.model_fields
        }
        # Any 64-bit seed is taken; the wire has the non-negative ones.
        fields["seed"] = secrets.randbits(63) if self.seed is None else self.seed & MAX_SEED
        fields["top_k"] = max(self.top_k, 0)
        return SamplingParams(
            **fields,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


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
    add_generation_prompt: bool = True  # vLLM's, as the next
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True  # vLLM's, as the next
    thinking_token_budget: int | None = Field(None, ge=-1, lt=2**31)  # -1: any number
    metadata: _Labels | None = None
    safety_identifier: _Label | None = None
    service_tier: Literal["auto", "default"] = "auto"

    @property
    def reasoning(self) -> ReasoningOptions:
        budget = self.thinking_token_budget
        return ReasoningOptions(not self.include_reasoning, None if budget == -1 else budget)

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
    return parse_body(raw, ChatBody, CHAT_UNSUPPORTED)


class CompletionBody(GenerationBody):
    """A checked completion request."""

    prompt: Prompts
    max_tokens: Integer = Field(16, ge=0, lt=2**31)
    best_of: Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool = False
    logprobs: Integer | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # -1: vLLM's, all tokens
    prompt_logprobs: Integer | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # vLLM's
    add_special_tokens: bool = True
    # This many tokens are kept, the last ones.
    truncate_prompt_tokens: Integer | None = Field(None, ge=1, lt=2**31)

    @property
    def candidates(self) -> int:
        """Return the number of sequences generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def generations(self) -> int:
        return self.candidates * len(self.prompt)

    @model_validator(mode="after")
    def _some_output(self) -> Self:
        if self.max_tokens < 1 and not self.echo:
            raise body_error("max_tokens", "max_tokens must be at least 1 without echo, not 0")
        if self.min_tokens > self.max_tokens:
            message = f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            raise body_error("min_tokens", f"min_tokens {message}")
        return self

    @model_validator(mode="after")
    def _best_of_more(self) -> Self:
        if self.candidates < self.n:
            raise body_error(
                "best_of", f"best_of must be at least n ({self.n}), not {self.best_of}"
            )
        if self.candidates > self.n and self.stream:
            message = f"best_of must be n ({self.n}) with stream=true, not {self.best_of}"
            raise body_error("best_of", message)
        if self.generations > MAX_SEQUENCES:
            message = (
                f"prompts times choices must be at most {MAX_SEQUENCES}, not {self.generations}"
            )
            raise body_error("n" if self.n > 1 else "prompt", message)
        return self

    @model_validator(mode="after")
    def _logprobs_can_be_shown(self) -> Self:
        if self.prompt_logprobs and self.stream:
            message = "prompt_logprobs is not supported with stream=true; echo with logprobs is"
            raise body_error("prompt_logprobs", message)
        if self.logprob_token_ids and (self.logprobs is None or not self.max_tokens):
            needed = "logprobs" if self.logprobs is None else "output: max_tokens from 1"
            message = f"logprob_token_ids is only allowed with {needed}"
            raise body_error("logprob_token_ids", message)
        return self


def parse_completion(raw: Mapping[str, Any]) -> CompletionBody:
    """Return the checked body. Raises ApiError (400) for the first mistake."""
    return parse_body(raw, CompletionBody, COMPLETION_UNSUPPORTED)
