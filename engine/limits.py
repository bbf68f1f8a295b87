"""Sizes of one engine, and what of a request can never fit them."""

from __future__ import annotations

import msgspec

from engine.kv_format import Precision, Storage
from engine.sampling.table import check_tokens
from engine.sequence import blocks_for
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import InvalidRequest
from protocol.request import Request


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one engine."""

    pages: int  # pages of the KV pool
    max_batch: int = 64  # sequences that run at once
    chunk: int = 512  # most prompt tokens in a step
    max_model_len: int = 4096  # tokens of one sequence
    step_budget_ms: float | None = None  # of a step with decoding; None: the policy's own, 0: none
    kv_precision: Precision = "exact"
    kv_storage: Storage = "wide"


def check(request: Request, tokens: int, config: EngineConfig, vocab_size: int) -> None:
    """Raises InvalidRequest when ``tokens`` tokens of this request can never be held here."""
    if tokens > config.max_model_len:
        raise InvalidRequest(
            f"{len(request.prompt)} prompt tokens and max_tokens={request.sampling.max_tokens}"
            f" make {tokens}, over the model's {config.max_model_len}",
            "max_tokens",
            "context_length_exceeded",
        )
    if blocks_for(tokens) > config.pages:
        raise InvalidRequest(
            f"{len(request.prompt)} prompt tokens and max_tokens={request.sampling.max_tokens} need"
            f" KV for {tokens} tokens; a worker's pool holds {config.pages * BLOCK_TOKENS}",
            "prompt",
            "context_length_exceeded",
        )
    if max(request.context) >= vocab_size:
        raise InvalidRequest(
            f"token id {max(request.context)} is outside the vocabulary of {vocab_size}", "prompt"
        )
    check_tokens(request.sampling, vocab_size)
