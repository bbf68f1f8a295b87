"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from protocol.sampling import MAX_LOGPROBS
from router.api.checks import Integer, Prompts, about
from router.api.fields import MAX_CHOICES, GenerationBody
from router.api.parse import parse
from router.api.unsupported import OF_COMPLETIONS

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
