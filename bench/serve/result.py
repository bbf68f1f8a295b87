"""A run's result: what is shown, written, read again and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.serve.figures import (
    Objectives,
    Summary,
    distribution,
    latencies,
    summarise,
)
from bench.serve.health import Health
from bench.serve.options import Options
from bench.serve.records import Record
from bench.serve.timeline import Point, Timeline, points, timeline
from protocol.errors import StartupError

FORMAT = "baton-bench-serve/1"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``distributions``: of each latency, the values in ms at ``figures.GRID``. ``records``: each
    request, where asked for."""

    format: str
    began: str  # ISO 8601, UTC
    interrupted: bool
    model: str
    dialect: str
    prompts: str
    config: dict[str, Any]
    summary: Summary
    health: Health
    distributions: dict[str, list[float]]
    timeline: Timeline
    points: list[Point]
    records: list[dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        """How it was loaded, in a few words."""
        c = self.config
        if c["rate"] is not None:
            return f"{self.model}, {c['rate']:g} requests/s ({c['arrivals']})"
        if c["concurrency"] is not None:
            return f"{self.model}, {c['concurrency']} at a time"
        return f"{self.model}, {Path(str(c['trace'])).name} x{c['speedup']:g}"


class Said(msgspec.Struct, frozen=True):
    """What is known beside the records."""

    began: str
    interrupted: bool
    model: str
    dialect: str
    prompts: str


def result(
    options: Options, said: Said, records: Sequence[Record], health: Health, keep: bool
) -> Result:
    goal = Objectives(options.ttft_slo_ms, options.tpot_slo_ms)
    return Result(
        format=FORMAT,
        **msgspec.structs.asdict(said),
        config=msgspec.to_builtins(options),
        summary=summarise(records, goal, options.concurrency is None),
        health=health,
        distributions={k: distribution(v) for k, v in latencies(records).items()},
        timeline=timeline(records),
        points=points(records),
        records=[_plain(r) for r in records] if keep else None,
    )


def _plain(record: Record) -> dict[str, Any]:
    fields = msgspec.structs.asdict(record)
    return fields | {"times": record.times.tolist(), "counts": record.counts.tolist()}


def write(path: Path, found: Result) -> None:
    """Raises StartupError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None


def read(path: Path) -> Result:
    """Raises StartupError for anything that ``write`` has not written."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as e:
        raise StartupError(f"{path} cannot be read: {e.strerror}") from None
    except msgspec.MsgspecError as e:
        raise StartupError(f"{path} is no result of `baton bench serve`: {e}") from None
    if found.format != FORMAT:
        raise StartupError(f"{path}: expected the format {FORMAT}, not {found.format!r}")
    return found
