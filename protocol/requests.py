"""The request that every process knows, the log-probabilities in its answer, and their wire forms.

The router creates a ``Request``; both kinds of workers and their engines receive it. It is frozen:
each stage wraps it in an object of its own and never changes it.
"""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Iterable

import msgspec

from protocol.errors import InvalidRequest
from protocol.sampling_params import (
    MAX_OUTPUT_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    SamplingParams,
    sampling_params_from_wire,
    sampling_params_to_wire,
)
from protocol.wire import wire_pb2 as pb

PRIORITIES = (-100, 100)
"""Least and greatest priority; requests with a lower one run earlier."""

MAX_WAITED_S = 86_400.0
"""Greatest age of a request in seconds that a peer may claim."""

MAX_ID_CHARS = 256
"""Characters of a request's id, which contains the id that its client gave it (128)."""

MAX_DEADLINE_S = 604_800.0
"""Greatest number of seconds that a peer may allow a request; a later deadline is none."""


def request_digest(request_id: str) -> int:
    """Return the CRC-32 of a request's id, at least 1: loads name requests by it. That two of a
    worker's latest requests share one makes a prediction wrong, and nothing else."""
    return zlib.crc32(request_id.encode()) or 1


_LEAST_LEFT_S = 0.001  # of a deadline that has passed: 0 would be none


class Finish(enum.IntEnum):
    """Why a request ended. The numbers are those of ``wire.proto``."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    ``emitted`` are output tokens that the client already has: they are context, are never sent
    again, and count towards ``sampling.max_tokens``.
    """

    id: str
    prompt: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    cache_root: bytes = b""
    priority: int = 0  # lower runs earlier
    waited_s: float = 0.0  # since a decode worker first had it: its place among equal ones
    # Limits on the time without a token, in seconds; 0: no limit. Who has the request computes
    # nothing for it afterwards; what its client is told is the router's matter.
    first_token_s: float = 0.0  # to the next token, from when this process got the request
    token_timeout_s: float = 0.0  # from each token to the one after it

    @property
    def first_token_limit_s(self) -> float:
        """Seconds until it expires while no token has come; infinite without a limit."""
        return self.first_token_s or math.inf

    @property
    def token_limit_s(self) -> float:
        """Seconds from a token after which it expires; infinite without a limit."""
        return self.token_timeout_s or math.inf

    def after(self, seconds: float) -> Request:
        """Return this request with the time that is left to its next token ``seconds`` later. A
        limit that has passed by then leaves a moment, because 0 is no limit."""
        if not self.first_token_s:
            return self
        left = max(self.first_token_s - seconds, _LEAST_LEFT_S)
        return msgspec.structs.replace(self, first_token_s=left)

    @property
    def context(self) -> tuple[int, ...]:
        """Every token known so far: what a prefill must compute."""
        return self.prompt + self.emitted

    @property
    def prompt_logprobs_due(self) -> int:
        """Number of prompt tokens whose log-probabilities accompany the next output token."""
        due = self.sampling.prompt_logprobs is not None and not self.emitted
        return len(self.prompt) - 1 if due else 0

    @property
    def length_limit(self) -> int:
        """Number of tokens, prompt included, at which the request ends."""
        return len(self.prompt) + self.sampling.max_tokens

    def resumed(self, emitted: Iterable[int], waited_s: float = 0.0) -> Request:
        """Return this request with ``emitted``, all output tokens that were sent so far, and with
        ``waited_s`` seconds that it has waited in all. Once a token was sent, the next one has the
        time of each later token."""
        sent = tuple(emitted)
        return msgspec.structs.replace(
            self,
            emitted=sent,
            waited_s=min(waited_s, MAX_WAITED_S),
            first_token_s=(
                self.token_timeout_s if len(sent) > len(self.emitted) else self.first_token_s
            ),
        )


_SCALARS = tuple(
    name for name in Request.__struct_fields__ if name not in ("prompt", "emitted", "sampling")
)


def request_to_wire(request: Request, into: pb.Request | None = None) -> pb.Request:
    """Return the request as a message: ``into``, which is empty, or a new one."""
    message = pb.Request() if into is None else into
    message.prompt.extend(request.prompt)
    message.emitted.extend(request.emitted)
    message.sampling.CopyFrom(sampling_params_to_wire(request.sampling))
    for name in _SCALARS:
        setattr(message, name, getattr(request, name))
    return message


def request_from_wire(message: pb.Request) -> Request:
    """Return the request in ``message``. Raises InvalidRequest when a field is out of its range,
    because the peer is not trusted."""
    if not message.id or len(message.id) > MAX_ID_CHARS:
        raise InvalidRequest("request id must have 1 to 128 characters", "id")
    if not message.prompt:
        raise InvalidRequest("prompt must hold at least one token", "prompt")
    sampling = sampling_params_from_wire(message.sampling)
    if sampling.max_tokens <= len(message.emitted):
        raise InvalidRequest(
            f"max_tokens ({sampling.max_tokens}) must exceed the {len(message.emitted)} tokens"
            " emitted",
            "max_tokens",
        )
    if len(message.cache_root) != 16:
        raise InvalidRequest("cache_root must have 16 bytes", "cache_root")
    low, high = PRIORITIES
    if not low <= message.priority <= high:
        raise InvalidRequest(
            f"priority must be in [{low}, {high}], not {message.priority}", "priority"
        )
    if not 0 <= message.waited_s <= MAX_WAITED_S:  # also refuses NaN
        raise InvalidRequest(
            f"waited_s must be in [0, {MAX_WAITED_S:g}], not {message.waited_s}", "waited_s"
        )
    for name in ("first_token_s", "token_timeout_s"):
        if not 0 <= getattr(message, name) <= MAX_DEADLINE_S:  # also refuses NaN
            raise InvalidRequest(
                f"{name} must be in [0, {MAX_DEADLINE_S:g}], not {getattr(message, name)}", name
            )
    top, length = sampling.prompt_logprobs, len(message.prompt)
    if top is not None and (top + 1) * length > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs={top} is possible up to {MAX_PROMPT_LOGPROBS // (top + 1)} prompt"
            f" tokens, not {length}",
            "prompt_logprobs",
        )
    return Request(
        id=message.id,
        prompt=tuple(message.prompt),
        emitted=tuple(message.emitted),
        sampling=sampling,
        cache_root=message.cache_root,
        priority=message.priority,
        waited_s=message.waited_s,
        first_token_s=message.first_token_s,
        token_timeout_s=message.token_timeout_s,
    )


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one drawn or prompt token: natural logarithms of the model's own
    probabilities, before temperature, filters, penalties and bias.

    ``rank`` of the token: 1 is the most likely; equal tokens share a rank. ``top_tokens`` are the
    most likely tokens, best first, as many as were requested; ``top_logprobs`` are their values.
    Where ``logprob_token_ids`` were requested, ``top_tokens`` are those in that order, after the
    drawn token if it is not one of them.
    """

    logprob: float
    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]


def logprobs_to_wire(value: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(**msgspec.structs.asdict(value))


def logprobs_from_wire(value: pb.Logprobs) -> Logprobs:
    """Return the log-probabilities of one token. Raises InvalidRequest for lists that no worker
    sends, because the peer is not trusted."""
    count = len(value.top_tokens)
    if count > MAX_OUTPUT_LOGPROBS or count != len(value.top_logprobs):
        raise InvalidRequest(
            f"as many top_logprobs as top_tokens, at most {MAX_OUTPUT_LOGPROBS}, were expected;"
            f" {len(value.top_logprobs)} and {count} came",
            "logprobs",
        )
    return Logprobs(value.logprob, value.rank, list(value.top_tokens), list(value.top_logprobs))


def logprobs_list_from_wire(values: Iterable[pb.Logprobs], count: int) -> list[Logprobs]:
    """Return the log-probabilities of ``count`` tokens. Raises InvalidRequest when another number
    of them came."""
    read = [logprobs_from_wire(value) for value in values]
    if len(read) != count:
        raise InvalidRequest(
            f"log-probabilities of {count} tokens were due, of {len(read)} came", "logprobs"
        )
    return read
