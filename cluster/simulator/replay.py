"""Decides a decision log anew: each snapshot must give the decision that was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cluster.sizing.decision import DecisionRecord, ScalingDecision, decode_record
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import SizingSnapshot
from protocol.errors import UsageError

_MOST_LINE_BYTES = 16 << 20


class DecisionDifference(NamedTuple):
    """One field, by its path, in which a recorded and a new decision differ."""

    line: int
    field: str
    recorded: str
    decided: str


class ReplayResult(NamedTuple):
    """``first``: the fields that differ in the first line that differs. ``damaged``: what is wrong
    with the first line that cannot be read."""

    lines: int
    agreed: int
    first: list[DecisionDifference]
    damaged: str | None

    @property
    def exact(self) -> bool:
        return self.damaged is None and self.agreed == self.lines


def replay(
    path: Path, policy: Callable[[SizingSnapshot], ScalingDecision] = decide
) -> ReplayResult:
    """Compare all decisions of a log with those of ``policy``.

    Raises UsageError for a file that cannot be read or is empty.
    """
    lines = agreed = 0
    first: list[DecisionDifference] = []
    try:
        for number, line in _lines(path):
            lines += 1
            try:
                record = decode_record(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                return ReplayResult(lines, agreed, first, f"line {number}: {e}")
            try:
                found = _differences(number, record, policy)
            except (ArithmeticError, ValueError) as e:  # figures that no cluster has
                return ReplayResult(lines, agreed, first, f"line {number}: cannot be decided: {e}")
            agreed += not found
            first = first or found
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}") from None
    if not lines:
        raise UsageError(f"{path} holds no decision")
    return ReplayResult(lines, agreed, first, None)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES):
            number += 1
            if line.strip():
                yield number, line


def _differences(
    number: int, record: DecisionRecord, policy: Callable[[SizingSnapshot], ScalingDecision]
) -> list[DecisionDifference]:
    """Compare two decisions as JSON has them, which writes a float that is not a number as null."""
    decided = msgspec.json.decode(
        msgspec.json.encode(policy(record.snapshot)), type=ScalingDecision
    )
    if decided == record.decision:
        return []
    was, now = msgspec.to_builtins(record.decision), msgspec.to_builtins(decided)
    return [DecisionDifference(number, *where) for where in _fields("", was, now)]


def _fields(path: str, was: Any, now: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**was, **now}:
            inner = f"{path}.{name}" if path else str(name)
            yield from _fields(inner, was.get(name), now.get(name))
    elif was != now:
        yield path, str(was), str(now)
