"""What the bodies of ``POST /v1/completions`` and ``POST /v1/chat/completions`` share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from protocol.requests import PRIORITIES
from protocol.sampling_params import MAX_SEED, SamplingParams
from router.common.errors import invalid
from router.openai.bodies.field_types import (
    AllowedTokenIds,
    Integer,
    LogitBias,
    LogprobTokenIds,
    StopStrings,
    StopTokenIds,
    StrictModel,
    body_error,
)
from router.openai.bodies.output_formats import (
    GUIDED_FIELDS,
    MAX_FORMAT_CHOICES,
    MAX_GRAMMAR_CHARS,
    ResponseFormat,
    StructuredOutputs,
)
from router.openai.bodies.parsing import OpenBody, describe_mistake

MAX_CHOICES = 64
ABSENT: Any = None
"""Default of optional fields whose type alias cannot be joined with None."""

ChoiceText = Annotated[str, Field(min_length=1)]
Tier = Annotated[str, Field(max_length=64)]


class StreamOptions(StrictModel):
    """``include_usage``: ``False`` turns off the usage of every chunk, too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk
    include_obfuscation: bool | None = None  # OpenAI's padding: accepted, none is ever added


class GenerationBody(OpenBody):
    """Checked fields that completions and chats share."""

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
    n_predict: Integer | None = Field(None, ge=-1, lt=2**31)  # llama.cpp's name of max_tokens
    min_tokens: Integer = Field(0, ge=0, lt=2**31)
    # vLLM's: this many tokens of a prompt are kept, the last ones; -1: as many as fit the model.
    truncate_prompt_tokens: Integer | None = Field(None, ge=-1, lt=2**31)
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # vLLM's: no tokenizer here writes any
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Integer = Field(0, ge=PRIORITIES[0], le=PRIORITIES[1])  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    prompt_cache_key: str | None = Field(None, max_length=512)  # a session's name
    user: str | None = None  # a label of the client; has no effect, as the next
    service_tier: Tier = "auto"
    response_format: ResponseFormat = ABSENT
    structured_outputs: StructuredOutputs | None = None  # vLLM's; ``guided_*`` are its older names
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    guided_choice: list[ChoiceText] | None = Field(
        None, min_length=1, max_length=MAX_FORMAT_CHOICES
    )
    guided_grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    json_schema: dict[str, Any] | None = None  # llama.cpp's names of the same, as the next
    grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)

    @property
    def generation(self) -> GenerationBody:
        """Return the internal request, which this body is itself."""
        return self

    @property
    def generations(self) -> int:
        """Return the number of sequences to generate."""
        return self.n

    def kept_tokens(self, room: int) -> int | None:
        """Return how many tokens of a prompt are kept, of which ``room`` fit the model beside the
        output; None: all."""
        kept = self.truncate_prompt_tokens
        return max(room, 1) if kept == -1 else kept

    @model_validator(mode="after")
    def _keeps_some_tokens(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, not 0; -1 keeps what fits"
            raise body_error("truncate_prompt_tokens", message)
        return self

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
            if name in GenerationBody.model_fields and name != "grammar"  # llama.cpp's field
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
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        if options is None or options.include_usage is False:
            return False
        return options.continuous_usage_stats is True


def with_max_tokens(
    raw: Mapping[str, Any], *names: str, least: int, unlimited: bool
) -> Mapping[str, Any]:
    """Return a raw body with ``n_predict`` as ``max_tokens``. ``names``: the other names of the
    bound; ``least``: the lowest one; ``unlimited``: whether -1 stands for none. Raises ApiError
    (400) for a bound that these do not allow, or that differs from ``max_tokens``."""
    bound = raw.get("n_predict")
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        return raw  # null, or a mistake that validation reports
    given = [raw[name] for name in ("max_tokens", *names) if raw.get(name) is not None]
    if bound == -1 and (given or unlimited):
        return raw
    if -1 <= bound < least:
        raise invalid(f"n_predict must be at least {least}, not {bound}", "n_predict")
    if not given:
        return {**raw, "max_tokens": bound}
    if any(other != bound for other in given):
        message = "n_predict is max_tokens by llama.cpp's name: send one of them"
        raise invalid(message, "n_predict")
    return raw
