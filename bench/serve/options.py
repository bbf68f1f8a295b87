"""What was asked for, checked as a whole, and the plan that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from bench.serve import arrivals
from bench.serve.lengths import Share, parse_length, parse_mix
from bench.serve.plan import Item, Pace, Sharing, bounded, drawn, traced
from bench.serve.traces import Line, read_trace
from protocol.errors import StartupError

DEFAULT_REQUESTS = 100
Endpoint = Literal["completions", "chat"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Holds no secret: ``api_key_env`` is the name of a variable. Times in the unit of the name."""

    url: str
    model: str = "auto"
    endpoint: Endpoint = "completions"
    api_key_env: str | None = None
    ca_file: str | None = None
    model_dir: str | None = None
    token_ids: str = "100-4000"

    rate: float | None = None
    arrivals: arrivals.Kind = "poisson"
    burstiness: float = 1.0
    concurrency: int | None = None
    trace: str | None = None
    speedup: float = 1.0
    limit: int | None = None
    trace_scale: float = 1.0
    max_context: int | None = None

    prompt: str = "128"
    output: str = "64"
    mix: str | None = None
    shared_prefix: int = 0
    prefix_groups: int = 1
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    salt: str = ""
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}

    warmup: int = 4
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    max_in_flight: int = 1024
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None

    def check(self) -> None:
        """Raises StartupError, with every mistake on a line of its own."""
        wrong = [*self._wrong_target(), *self._wrong_load(), *self._wrong_numbers()]
        if wrong:
            raise StartupError("\n".join(wrong))

    def _wrong_target(self) -> Iterator[str]:
        parts = urlsplit(self.url)
        if parts.username or parts.password:  # which are not to be printed
            yield "--url: must hold no password; name a variable with --api-key-env"
        elif parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"--url: expected http://HOST:PORT or https://HOST:PORT, not {self.url!r}"
        reserved = sorted({"prompt", "messages", "stream", "max_tokens"} & set(self.extra_body))
        if reserved:
            yield f"--extra-body: {', '.join(reserved)} cannot be set there"

    def _wrong_load(self) -> Iterator[str]:
        loads = [self.rate is not None, self.concurrency is not None, self.trace is not None]
        if sum(loads) != 1:
            yield "expected exactly one of --rate, --concurrency and --trace"
        if self.arrivals != "gamma" and self.burstiness != 1.0:
            yield f"--burstiness: needs --arrivals gamma, not {self.arrivals}"
        if self.arrivals not in arrivals.KINDS:
            yield f"--arrivals: expected one of {', '.join(arrivals.KINDS)}, not {self.arrivals!r}"

    def _wrong_numbers(self) -> Iterator[str]:
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                yield f"--{_flag(name)}: must be above 0, not {value}"
        for name in ("shared_prefix", "warmup", "temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                yield f"--{_flag(name)}: must be at least 0, not {value}"

    def mix_of_lengths(self) -> tuple[Share, ...]:
        """Raises StartupError."""
        if self.mix is not None:
            return parse_mix(self.mix)
        lengths = parse_length(self.prompt, "--input"), parse_length(self.output, "--output")
        return (Share(1.0, *lengths),)

    def id_range(self) -> tuple[int, int]:
        """Raises StartupError."""
        low, _, high = self.token_ids.partition("-")
        if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
            raise StartupError(f"--token-ids: expected LOW-HIGH, not {self.token_ids!r}")
        return int(low), int(high)

    def plan(self) -> Iterator[Item]:
        """In the order in which they are due. Raises StartupError."""
        requests = self.requests
        if self.trace is not None:
            lines = self._lines(self.limit)
            items = traced(lines, self.speedup, self.trace_scale, self.max_context)
            return bounded(items, requests, self.duration_s)
        if requests is None and self.duration_s is None:
            requests = DEFAULT_REQUESTS
        pace = Pace(self.arrivals, self.rate, self.burstiness) if self.rate is not None else None
        sharing = Sharing(self.shared_prefix, self.prefix_groups)
        items = drawn(self.mix_of_lengths(), sharing, pace, self.seed)
        return bounded(items, requests, self.duration_s)

    def _lines(self, limit: int | None) -> list[Line]:
        assert self.trace is not None
        return read_trace(Path(self.trace), limit)

    def warmup_plan(self) -> list[Item]:
        """Of the same lengths, sharing nothing with what is measured. Raises StartupError."""
        if self.trace is not None:
            lines = [Line(0.0, x.prompt, x.output) for x in self._lines(self.warmup)]
            return list(traced(lines, 1.0, self.trace_scale, self.max_context, "warm-up"))
        nothing = Sharing(0, 1)
        items = drawn(self.mix_of_lengths(), nothing, None, self.seed + 1, "warm-up")
        return list(bounded(items, self.warmup, None))


_ABOVE_0 = (
    *("rate", "burstiness", "concurrency", "speedup", "limit", "trace_scale", "max_context"),
    *("prefix_groups", "requests", "duration_s", "timeout_s", "connect_timeout_s"),
    *("max_in_flight", "ttft_slo_ms", "tpot_slo_ms"),
)


def _flag(name: str) -> str:
    return {"duration_s": "duration", "timeout_s": "timeout"}.get(name, name.replace("_", "-"))
