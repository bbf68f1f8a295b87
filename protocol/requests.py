"""A request as every process knows it. Frozen: a stage wraps it, and never changes it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from protocol.errors import InvalidRequest
from protocol.sampling_params import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    sampling_from_wire,
    sampling_to_wire,
)
from protocol.sampling_params import MAX_SEED as MAX_SEED
from protocol.sampling_params import Sampling as Sampling
from protocol.wire import wire_pb2 as pb

PRIORITIES = (-100, 100)
"""Least and greatest priority; lower runs earlier."""


class Finish(enum.IntEnum):
    """Why a request ended. The numbers are those of ``wire.proto``."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    ``emitted`` are output tokens that the client already has: they are context, never sent again,
    and count towards ``sampling.max_tokens``.
    """

    id: str
    prompt: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    cache_root: bytes = b""
    priority: int = 0  # lower runs earlier

    @property
    def context(self) -> tuple[int, ...]:
        """Every token known so far: what a prefill must compute."""
        return self.prompt + self.emitted

    @property
    def prompt_logprobs_due(self) -> int:
        """Tokens of the prompt whose log-probabilities come with the next output token."""
        asked = self.sampling.prompt_logprobs is not None and not self.emitted
        return len(self.prompt) - 1 if asked else 0

    @property
    def length_limit(self) -> int:
        """Tokens in all, prompt included, at which the request ends."""
        return len(self.prompt) + self.sampling.max_tokens

    def resumed(self, emitted: Iterable[int]) -> Request:
        """The same request after ``emitted`` (all output tokens so far) have been sent."""
        return msgspec.structs.replace(self, emitted=tuple(emitted))


def to_wire(request: Request) -> pb.Request:
    return pb.Request(
        id=request.id,
        prompt=request.prompt,
        emitted=request.emitted,
        sampling=sampling_to_wire(request.sampling),
        cache_root=request.cache_root,
        priority=request.priority,
    )


def from_wire(message: pb.Request) -> Request:
    """Raises InvalidRequest when a field is out of its range: the peer is not trusted."""
    if not message.id or len(message.id) > 128:
        raise InvalidRequest("request id must have 1 to 128 characters", "id")
    if not message.prompt:
        raise InvalidRequest("prompt must hold at least one token", "prompt")
    sampling = sampling_from_wire(message.sampling)
    if sampling.max_tokens <= len(message.emitted):
        raise InvalidRequest(
            f"max_tokens ({sampling.max_tokens}) must exceed the {len(message.emitted)} tokens"
            " emitted",
            "max_tokens",
        )
    _check_prompt_logprobs(message)
    if len(message.cache_root) != 16:
        raise InvalidRequest("cache_root must have 16 bytes", "cache_root")
    low, high = PRIORITIES
    if not low <= message.priority <= high:
        raise InvalidRequest(
            f"priority must be in [{low}, {high}], not {message.priority}", "priority"
        )
    return Request(
        id=message.id,
        prompt=tuple(message.prompt),
        emitted=tuple(message.emitted),
        sampling=sampling,
        cache_root=message.cache_root,
        priority=message.priority,
    )


def _check_prompt_logprobs(message: pb.Request) -> None:
    if not message.sampling.HasField("prompt_logprobs"):
        return
    each = message.sampling.prompt_logprobs + 1
    if each * len(message.prompt) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs={each - 1} is possible up to {MAX_PROMPT_LOGPROBS // each} prompt"
            f" tokens, not {len(message.prompt)}",
            "prompt_logprobs",
        )


# MERGED protocol.logprobs
# Log-probabilities that travel beside a drawn token.


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities, before temperature, filters, penalties
    and bias.

    ``rank`` of the drawn token: 1 is the most likely; equal ones share a rank. ``top_tokens`` are
    the most likely tokens, best first, as many as were asked for; ``top_logprobs`` is theirs.
    """

    logprob: float
    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]


def logprobs_to_wire(value: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=value.logprob,
        rank=value.rank,
        top_tokens=value.top_tokens,
        top_logprobs=value.top_logprobs,
    )


def all_from_wire(values: Iterable[pb.Logprobs], count: int) -> list[Logprobs]:
    """Those of ``count`` tokens. Raises InvalidRequest where as many did not come."""
    read = [logprobs_from_wire(value) for value in values]
    if len(read) != count:
        raise InvalidRequest(
            f"log-probabilities of {count} tokens were due, of {len(read)} came", "logprobs"
        )
    return read


def logprobs_from_wire(value: pb.Logprobs) -> Logprobs:
    """Raises InvalidRequest for what no worker may say: the peer is not trusted."""
    count = len(value.top_tokens)
    if count > MAX_LOGPROBS or count != len(value.top_logprobs):
        raise InvalidRequest(
            f"as many top_logprobs as top_tokens, at most {MAX_LOGPROBS}, were expected;"
            f" {len(value.top_logprobs)} and {count} came",
            "logprobs",
        )
    return Logprobs(value.logprob, value.rank, list(value.top_tokens), list(value.top_logprobs))
