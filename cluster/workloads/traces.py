"""Readers of public request traces.

- Mooncake (kvcache-ai/Mooncake) has one JSON object per line: ``timestamp`` in ms, lengths in
  tokens, and ``hash_ids``, one per block of 512 prompt tokens. Equal ids are equal tokens.
- Azure (Azure/AzurePublicDataset) is CSV with the columns TIMESTAMP, ContextTokens and
  GeneratedTokens.
"""

from __future__ import annotations

import csv
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.errors import UsageError

BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000


class TraceRequest(NamedTuple):
    """One request of a trace: ``at`` in seconds from the zero of the trace, lengths in tokens."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_decode = msgspec.json.Decoder(_Mooncake).decode


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for text in lines:
        r = _decode(text)
        yield TraceRequest(r.timestamp / 1e3, r.input_length, r.output_length, r.hash_ids)


def _azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield TraceRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def cached_tokens(prompts: Iterable[tuple[int, Sequence[Hashable]]]) -> list[int]:
    """Return how many tokens of each prompt are in a prefix of blocks that earlier ones had, as in
    an unlimited cache. ``prompts``: the tokens and the blocks of each."""
    seen: set[Hashable] = set()
    found = []
    for tokens, blocks in prompts:
        known = sum(1 for _ in takewhile(seen.__contains__, blocks))
        found.append(min(known * BLOCK_TOKENS, tokens))
        seen.update(blocks)
    return found


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Return the first ``limit`` requests of a file that is sorted by time.

    A ``.csv`` file has Azure's format and any other file Mooncake's. Raises UsageError, which
    names the line that cannot be read.
    """
    parse = _azure if path.suffix == ".csv" else _mooncake
    counted = _LineCounter()
    found: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in islice(parse(counted(file)), limit):
                _check(line, found)
                found.append(line)
    except OSError as e:
        raise UsageError(f"--trace: {path} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as e:
        raise UsageError(f"--trace: {path}:{counted.line}: {_explain(e)}") from None
    if not found:
        raise UsageError(f"--trace: {path} holds no request")
    return found


class _LineCounter:
    """Passes non-empty lines on and counts all of them, for error messages."""

    def __init__(self) -> None:
        self.line = 0

    def __call__(self, lines: Iterable[str]) -> Iterator[str]:
        for text in lines:
            self.line += 1
            if text.strip():
                yield text


def _check(line: TraceRequest, before: Sequence[TraceRequest]) -> None:
    """Raise ValueError for a length out of bounds or a request out of order."""
    for name, tokens in (("prompt", line.prompt), ("output", line.output)):
        if not 0 <= tokens <= MAX_TOKENS:
            raise ValueError(f"a {name} of {tokens} tokens; expected 0 to {MAX_TOKENS}")
    if before and line.at < before[-1].at:
        raise ValueError("earlier than the request before it; a trace is in the order of time")


def _explain(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no column {error.args[0]}; expected TIMESTAMP,ContextTokens,GeneratedTokens"
    return str(error)
