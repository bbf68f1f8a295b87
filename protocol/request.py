"""A request as every process knows it. Frozen: a stage wraps it, and never changes it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_STOP_TOKENS = 64


class Finish(enum.IntEnum):
    """Why a request ended. The numbers are those of ``wire.proto``."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. A pure function of these, the logits and the position."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


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

    @property
    def context(self) -> tuple[int, ...]:
        """Every token known so far: what a prefill must compute."""
        return self.prompt + self.emitted

    @property
    def length_limit(self) -> int:
        """Tokens in all, prompt included, at which the request ends."""
        return len(self.prompt) + self.sampling.max_tokens

    def resumed(self, emitted: Iterable[int]) -> Request:
        """The same request after ``emitted`` (all output tokens so far) have been sent."""
        return msgspec.structs.replace(self, emitted=tuple(emitted))


def to_wire(request: Request) -> pb.Request:
    s = request.sampling
    return pb.Request(
        id=request.id,
        prompt=request.prompt,
        emitted=request.emitted,
        cache_root=request.cache_root,
        sampling=pb.Sampling(
            temperature=s.temperature,
            top_p=s.top_p,
            seed=s.seed,
            choice=s.choice,
            max_tokens=s.max_tokens,
            ignore_eos=s.ignore_eos,
            stop_token_ids=s.stop_token_ids,
        ),
    )


def from_wire(message: pb.Request) -> Request:
    """Raises InvalidRequest when a field is out of its range: the peer is not trusted."""
    s = message.sampling
    if not message.id or len(message.id) > 128:
        raise InvalidRequest("request id must have 1 to 128 characters", "id")
    if not message.prompt:
        raise InvalidRequest("prompt must hold at least one token", "prompt")
    if not (0.0 <= s.temperature <= 100.0):  # also refuses NaN
        raise InvalidRequest(f"temperature must be in [0, 100], not {s.temperature}", "temperature")
    if not (0.0 < s.top_p <= 1.0):
        raise InvalidRequest(f"top_p must be in (0, 1], not {s.top_p}", "top_p")
    if s.seed > MAX_SEED:
        raise InvalidRequest(f"seed must be below 2**63, not {s.seed}", "seed")
    if len(s.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"at most {MAX_STOP_TOKENS} stop_token_ids, not {len(s.stop_token_ids)}",
            "stop_token_ids",
        )
    if s.max_tokens <= len(message.emitted):
        raise InvalidRequest(
            f"max_tokens ({s.max_tokens}) must exceed the {len(message.emitted)} tokens emitted",
            "max_tokens",
        )
    if len(message.cache_root) != 16:
        raise InvalidRequest("cache_root must have 16 bytes", "cache_root")
    return Request(
        id=message.id,
        prompt=tuple(message.prompt),
        emitted=tuple(message.emitted),
        cache_root=message.cache_root,
        sampling=Sampling(
            temperature=s.temperature,
            top_p=s.top_p,
            seed=s.seed,
            choice=s.choice,
            max_tokens=s.max_tokens,
            ignore_eos=s.ignore_eos,
            stop_token_ids=tuple(s.stop_token_ids),
        ),
    )
