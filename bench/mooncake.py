"""Mooncake's conversation trace, scaled to the demo model: a sixteenth of all lengths.

The trace (kvcache-ai/Mooncake, ``FAST25-release/traces/conversation_trace.jsonl``, Apache-2.0; one
JSON object a line) gives for each request its time, its lengths, and an id for each prefix of 512
tokens. Here such a block is one of ours, of 32 tokens: equal ids become equal tokens, so who shares
which prefix stays as it was. What is longer than the model's context is cut (2% of the requests).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.blocks import BLOCK_TOKENS

TRACE_BLOCK = 512
SCALE = TRACE_BLOCK // BLOCK_TOKENS
CONTEXT = 4096
VOCAB = 4096
LEAST_OUTPUT = 4
"""With fewer there is no time per output token to speak of."""


class TraceRequest(msgspec.Struct, frozen=True):
    """A line of the trace."""

    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


class Arrival(NamedTuple):
    """A request to send. ``at``: seconds after the beginning."""

    at: float
    prompt: list[int]
    output: int


def read_trace(path: Path) -> list[TraceRequest]:
    """In the order of time."""
    decode = msgspec.json.Decoder(TraceRequest).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


def sample(trace: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """``count`` requests in the order of time: conversations drawn at random, each with all its
    requests, so that a turn's predecessor is there as in the whole trace."""
    conversations: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in trace:
        # All share the first block; the second tells conversations apart.
        conversations[request.hash_ids[min(1, len(request.hash_ids) - 1)]].append(request)
    drawn = list(conversations.values())
    random.Random(seed).shuffle(drawn)
    chosen: list[TraceRequest] = []
    for conversation in drawn:
        if len(chosen) + len(conversation) <= count:
            chosen += conversation
    return sorted(chosen, key=lambda r: r.timestamp)


def block(number: int) -> list[int]:
    """The tokens that stand for a block of the trace."""
    draw = random.Random(number)
    return [draw.randrange(3, VOCAB) for _ in range(BLOCK_TOKENS)]


def scaled(requests: Sequence[TraceRequest], seconds: float) -> list[Arrival]:
    """Those requests within ``seconds``, at the distances in time that they have in the trace."""
    first = requests[0].timestamp
    span = max(1, requests[-1].timestamp - first)
    arrivals = []
    for request in requests:
        output = max(LEAST_OUTPUT, request.output_length // SCALE)
        length = max(2, min(CONTEXT - output, request.input_length // SCALE))
        prompt = [token for number in request.hash_ids for token in block(number)][:length]
        arrivals.append(Arrival(seconds * (request.timestamp - first) / span, prompt, output))
    return arrivals
