"""What completions and chats have in common: sampling, stops, streams, choices."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from protocol.request import PRIORITIES
from router.api.checks import Bias, Integer, StopIds, Stops, about
from router.api.phrases import wrong
from router.chat.fields import Strict
from router.chat.structured import (
    GUIDED,
    MAX_GRAMMAR_CHARS,
    ResponseFormat,
    StructuredOutputs,
)
from router.chat.structured import MAX_CHOICES as MAX_FORMAT_CHOICES

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
