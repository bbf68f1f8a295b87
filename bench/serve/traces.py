"""Traces of requests in the formats of Mooncake and Azure.

- Mooncake (kvcache-ai/Mooncake): a JSON object a line; ``timestamp`` in ms, lengths in tokens, and
  ``hash_ids``, one for each block of 512 tokens of the prompt: equal ids are equal tokens.
- Azure (Azure/AzurePublicDataset): CSV; ``TIMESTAMP,ContextTokens,GeneratedTokens``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.errors import StartupError

BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000


class Line(NamedTuple):
    """A request of a trace. ``at``: seconds, from wherever the trace counts. Lengths in tokens."""

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


def _mooncake(lines: Iterable[str]) -> Iterator[Line]:
    for text in lines:
        r = _decode(text)
        yield Line(r.timestamp / 1e3, r.input_length, r.output_length, r.hash_ids)


def _azure(lines: Iterable[str]) -> Iterator[Line]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Line(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def read_trace(path: Path, limit: int | None = None) -> list[Line]:
    """The first ``limit`` requests of a file that is in the order of time; ``.csv`` is Azure's
    format, anything else Mooncake's. Raises StartupError with the line that cannot be read."""
    parse = _azure if path.suffix == ".csv" else _mooncake
    counted = _Counted()
    found: list[Line] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in islice(parse(counted(file)), limit):
                _check(line, found)
                found.append(line)
    except OSError as e:
        raise StartupError(f"--trace: {path} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as e:
        raise StartupError(f"--trace: {path}:{counted.line}: {_says(e)}") from None
    if not found:
        raise StartupError(f"--trace: {path} holds no request")
    return found


class _Counted:
    """Passes lines on, without empty ones, and knows the number of the last."""

    def __init__(self) -> None:
        self.line = 0

    def __call__(self, lines: Iterable[str]) -> Iterator[str]:
        for text in lines:
            self.line += 1
            if text.strip():
                yield text


def _check(line: Line, before: Sequence[Line]) -> None:
    """Raises ValueError."""
    for name, tokens in (("prompt", line.prompt), ("output", line.output)):
        if not 0 <= tokens <= MAX_TOKENS:
            raise ValueError(f"a {name} of {tokens} tokens; expected 0 to {MAX_TOKENS}")
    if before and line.at < before[-1].at:
        raise ValueError("earlier than the request before it; a trace is in the order of time")


def _says(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no column {error.args[0]}; expected TIMESTAMP,ContextTokens,GeneratedTokens"
    return str(error)


def fitted(line: Line, scale: float, context: int | None) -> tuple[int, int]:
    """Tokens of prompt and output, times ``scale``, at least 1 each. What is longer than a context
    of so many tokens together is cut: the output first to half of it, then the prompt."""
    prompt, output = (max(1, round(tokens * scale)) for tokens in (line.prompt, line.output))
    if context is not None:
        output = min(output, max(1, context // 2))
        prompt = min(prompt, max(1, context - output))
    return prompt, output
