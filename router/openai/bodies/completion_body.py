"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from protocol.sampling_params import MAX_LOGPROBS
from router.openai.bodies.field_types import Integer, Prompts, body_error
from router.openai.bodies.generation_body import MAX_CHOICES, GenerationBody, with_max_tokens
from router.openai.bodies.parsing import COMPLETION_UNSUPPORTED, parse_open_body

MAX_SEQUENCES = 128
"""Prompts times candidates of one completion request."""


class CompletionBody(GenerationBody):
    """A checked completion request."""

    prompt: Prompts
    max_tokens: Integer = Field(16, ge=0, lt=2**31)
    best_of: Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool = False
    logprobs: Integer | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # -1: vLLM's, all tokens
    prompt_logprobs: Integer | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # vLLM's
    add_special_tokens: bool = True

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
    least = 0 if raw.get("echo") else 1
    raw = with_max_tokens(raw, least=least, unlimited=False)
    return parse_open_body(raw, CompletionBody, COMPLETION_UNSUPPORTED)
