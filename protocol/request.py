"""A request as every process knows it. Frozen: a stage wraps it, and never changes it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest
from protocol.sampling import MAX_PROMPT_LOGPROBS, sampling_from_wire, sampling_to_wire
from protocol.sampling import MAX_SEED as MAX_SEED
from protocol.sampling import Sampling as Sampling

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
