"""The workload of a plan: stated length distributions or a trace, as the policy's request mix.
Pure.

A distribution is represented by equally likely points (the middles of POINTS parts); prompts and
outputs are paired so that they are uncorrelated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import NormalDist

import msgspec

from cluster.sizing.residency import resident_sequences
from cluster.sizing.snapshot import MachineModel, RequestMix, RequestSample
from cluster.workloads.distributions import FORMS as PARSED
from cluster.workloads.distributions import (
    ConstantLength,
    Length,
    LogNormalLength,
    UniformLength,
    parse_length,
)
from cluster.workloads.traces import BLOCK_TOKENS, TraceRequest, cached_tokens
from protocol.errors import UsageError

FORMS = f"{PARSED}, or MEAN/P90"
POINTS = 64
_STRIDE = 25
"""Coprime to POINTS, and near its golden section, so that pairs spread evenly."""
MAX_SAMPLES = 512
"""More requests of a trace are merged with those that are similar."""
_P90 = NormalDist().inv_cdf(0.9)
_MAX_TOKENS = 10_000_000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """``source``: where it is from, for readers. ``mix``: without a window, because the load is
    known and does not grow. ``kept_tokens``: tokens that a cache must hold for as many hits as
    counted; 0 where there are none, or their share was stated."""

    source: str
    mix: RequestMix
    kept_tokens: int = 0

    @property
    def told(self) -> str:
        """A description for readers."""
        return (
            f"{self.source}, prompts of {self.prompt:,.0f} tokens on average, {self.shared:.0%} of"
            f" them cached, answers of {self.output:,.0f}"
        )

    @property
    def prompt(self) -> float:
        """Mean prompt tokens, cached ones included."""
        return self._mean(lambda s: s.uncached + s.cached)

    @property
    def output(self) -> float:
        return self._mean(lambda s: s.output)

    @property
    def shared(self) -> float:
        """Share of the prompt tokens that is cached."""
        return self._mean(lambda s: s.cached) / self.prompt

    @property
    def context(self) -> float:
        """Mean tokens of a sequence while it decodes."""
        anywhere = MachineModel(step=(0, 0, 0, 0, 0), chunk=1, max_batch=1, kv_tokens=0, kv_bytes=0)
        return resident_sequences(self.mix, anywhere).kv_tokens

    def _mean(self, value: Callable[[RequestSample], float]) -> float:
        samples = self.mix.samples
        return sum(value(s) * s.weight for s in samples) / sum(s.weight for s in samples)


def parse_workload_length(text: str, option: str) -> Length:
    """Parse ``FORMS``; MEAN/P90 is a log-normal distribution with these two. Raises
    UsageError."""
    mean_text, slash, p90_text = text.partition("/")
    if not slash:
        return parse_length(text, option)
    try:
        mean, p90 = float(mean_text), float(p90_text)
    except ValueError:
        mean = p90 = math.nan
    if not 1 <= mean <= p90 <= _MAX_TOKENS:
        raise UsageError(f"{option}: expected {FORMS}, the mean at most the p90, not {text!r}")
    # p90 = mean * exp(1.28 sigma - sigma^2 / 2)
    left = _P90**2 - 2.0 * math.log(p90 / mean)
    if left < 0:
        raise UsageError(
            f"{option}: the p90 of a log-normal is at most {math.exp(_P90**2 / 2):.2f} times its"
            f" mean, not {p90 / mean:.2f} times: use lognormal:MEAN,SIGMA, or a trace"
        )
    return LogNormalLength(mean, _P90 - math.sqrt(left), _MAX_TOKENS)


def equally_likely_lengths(length: Length) -> list[float]:
    """Return POINTS lengths that are equally likely, with the distribution's own mean."""
    shares = [(i + 0.5) / POINTS for i in range(POINTS)]
    match length:
        case ConstantLength(tokens):
            return [float(tokens)] * POINTS
        case UniformLength(low, high):
            return [low + (high - low) * share for share in shares]
        case LogNormalLength(mean, sigma, most):
            found = [math.exp(sigma * NormalDist().inv_cdf(share)) for share in shares]
            scale = mean * POINTS / sum(found)
            return [min(float(most), max(1.0, value * scale)) for value in found]


def stated_workload(prompt: Length, output: Length, rate: float, shared: float) -> Workload:
    """Return the workload of stated lengths; ``shared``: the share of each prompt's tokens that is
    cached."""
    prompts, outputs = equally_likely_lengths(prompt), equally_likely_lengths(output)
    pairs = Counter((prompts[i], outputs[i * _STRIDE % POINTS]) for i in range(POINTS))
    samples = tuple(
        RequestSample(tokens * (1 - shared), tokens * shared, answer, float(count))
        for (tokens, answer), count in pairs.items()
    )
    mix = RequestMix(rate=rate, window_s=0.0, samples=samples)
    return Workload(source=f"{rate:g} requests/s", mix=mix)


def traced_workload(
    lines: Sequence[TraceRequest], name: str, rate: float | None, scale: float, shared: float | None
) -> Workload:
    """Return the workload of a trace at its own mean rate, or at ``rate``, times ``scale``.

    ``shared`` None: blocks that occurred before are cached, as in an unlimited cache; without
    blocks, nothing is.
    """
    span = lines[-1].at - lines[0].at
    if rate is None and (span <= 0 or len(lines) < 2):
        raise UsageError("--trace: all its requests arrive at once; give --rate")
    own = (rate if rate is not None else (len(lines) - 1) / span) * scale
    hits: Sequence[float] = [(shared or 0.0) * line.prompt for line in lines]
    if shared is None:
        hits = cached_tokens((line.prompt, line.blocks) for line in lines)
    kept = _distinct_tokens(lines) if shared is None and any(hits) else 0
    samples = [
        RequestSample(
            float(max(1, line.prompt - hit)), float(min(hit, line.prompt - 1)), line.output
        )
        for line, hit in zip(lines, hits, strict=True)
        if line.prompt > 0
    ]
    samples.sort(key=lambda s: (s.uncached, s.output))
    if not samples:
        raise UsageError("--trace: no request has a prompt")
    mix = RequestMix(rate=own, window_s=0.0, samples=_grouped(samples))
    source = f"{name}: {len(lines)} requests, {own:.3g} requests/s"
    return Workload(source=source, mix=mix, kept_tokens=kept)


def _distinct_tokens(lines: Sequence[TraceRequest]) -> int:
    """Return the tokens of all blocks, each counted once. The last block of a prompt may not be
    full."""
    sizes: dict[int, int] = {}
    for line in lines:
        for i, block in enumerate(line.blocks):
            tokens = min(BLOCK_TOKENS, line.prompt - i * BLOCK_TOKENS)
            sizes[block] = max(sizes.get(block, 0), tokens)
    return sum(sizes.values())


def _grouped(samples: Sequence[RequestSample]) -> tuple[RequestSample, ...]:
    """Return at most MAX_SAMPLES samples, each the mean of neighbours in order."""
    size = math.ceil(len(samples) / MAX_SAMPLES)
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    return tuple(
        RequestSample(
            sum(s.uncached for s in group) / len(group),
            sum(s.cached for s in group) / len(group),
            sum(s.output for s in group) / len(group),
            float(len(group)),
        )
        for group in groups
    )
