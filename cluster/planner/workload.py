"""What is asked of a cluster: lengths as a user states them, or a trace, as the policy's mix. Pure.

Lengths are told by equally likely points of their distribution (the middles of POINTS parts),
prompts and outputs paired so that they know nothing of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import msgspec

from cluster.sizing.moments import residents
from cluster.sizing.snapshot import Machine, Mix, Sample
from cluster.workloads.lengths import FORMS as PARSED
from cluster.workloads.lengths import Fixed, Length, LogNormal, Share, Uniform, parse_length
from cluster.workloads.traces import BLOCK_TOKENS, TraceRequest
from protocol.errors import StartupError

FORMS = f"{PARSED}, or MEAN/P90"
POINTS = 64
_STRIDE = 25
"""Has no divisor in common with POINTS, and is near its golden section: pairs spread evenly."""
MOST_SAMPLES = 512
"""More requests of a trace are taken together with those that are like them."""
_P90 = NormalDist().inv_cdf(0.9)
_MOST = 10_000_000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """``told``: for a reader. ``kept_tokens``: that a cache has to hold for as many hits as
    counted; 0: none were, or somebody said how many there are."""

    told: str
    mix: Mix
    kept_tokens: int = 0

    @property
    def prompt(self) -> float:
        """Tokens on average, cached ones included."""
        return self._mean(lambda s: s.uncached + s.cached)

    @property
    def output(self) -> float:
        return self._mean(lambda s: s.output)

    @property
    def shared(self) -> float:
        """Share of the prompts' tokens that is cached."""
        return self._mean(lambda s: s.cached) / self.prompt

    @property
    def context(self) -> float:
        """Tokens that a sequence holds on average while it decodes."""
        anywhere = Machine(step=(0, 0, 0, 0, 0), chunk=1, max_batch=1, kv_tokens=0, kv_bytes=0)
        return residents(self.mix, anywhere).kv_tokens

    def at(self, rate: float) -> Mix:
        """The same at another rate."""
        return msgspec.structs.replace(self.mix, rate=rate)

    def _mean(self, of: Callable[[Sample], float]) -> float:
        samples = self.mix.samples
        return sum(of(s) * s.weight for s in samples) / sum(s.weight for s in samples)


def length(text: str, option: str) -> Length:
    """``FORMS``; MEAN/P90 is a log-normal with these two. Raises StartupError."""
    mean_text, slash, p90_text = text.partition("/")
    if not slash:
        return parse_length(text, option)
    try:
        mean, p90 = float(mean_text), float(p90_text)
    except ValueError:
        mean = p90 = math.nan
    if not 1 <= mean <= p90 <= _MOST:
        raise StartupError(f"{option}: expected {FORMS}, the mean at most the p90, not {text!r}")
    # p90 = mean * exp(1.28 sigma - sigma^2 / 2)
    left = _P90**2 - 2.0 * math.log(p90 / mean)
    if left < 0:
        raise StartupError(
            f"{option}: the p90 of a log-normal is at most {math.exp(_P90**2 / 2):.2f} times its"
            f" mean, not {p90 / mean:.2f} times: use lognormal:MEAN,SIGMA, or a trace"
        )
    return LogNormal(mean, _P90 - math.sqrt(left), _MOST)


def points(of: Length) -> list[float]:
    """POINTS lengths that are equally likely, with the distribution's own mean."""
    shares = [(i + 0.5) / POINTS for i in range(POINTS)]
    match of:
        case Fixed(tokens):
            return [float(tokens)] * POINTS
        case Uniform(low, high):
            return [low + (high - low) * share for share in shares]
        case LogNormal(mean, sigma, most):
            found = [math.exp(sigma * NormalDist().inv_cdf(share)) for share in shares]
            scale = mean * POINTS / sum(found)
            return [min(float(most), max(1.0, value * scale)) for value in found]


def stated(mix: Sequence[Share], rate: float, shared: float) -> Workload:
    """``shared``: of each prompt's tokens, that are cached."""
    samples = [
        Sample(prompt * (1 - shared), prompt * shared, output, share.weight)
        for share in mix
        for prompt, output in _pairs(share)
    ]
    of = Mix(rate=rate, window_s=0.0, samples=_merged(samples))
    found = Workload(told="", mix=of)
    told = f"{rate:g} requests/s, {_means(found)}"
    return msgspec.structs.replace(found, told=told)


def _pairs(share: Share) -> list[tuple[float, float]]:
    prompts, outputs = points(share.prompt), points(share.output)
    return [(prompts[i], outputs[i * _STRIDE % POINTS]) for i in range(POINTS)]


def _merged(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Equal ones are one."""
    weights: dict[tuple[float, float, float], float] = {}
    for s in samples:
        key = (s.uncached, s.cached, s.output)
        weights[key] = weights.get(key, 0.0) + s.weight
    return tuple(Sample(*key, weight) for key, weight in weights.items())


def traced(
    lines: Sequence[TraceRequest], name: str, rate: float | None, scale: float, shared: float | None
) -> Workload:
    """Of a trace: its own mean rate where ``rate`` is None, times ``scale``. ``shared`` None:
    blocks that came before are cached, as in a cache without end; without blocks, nothing."""
    span = lines[-1].at - lines[0].at
    if rate is None and (span <= 0 or len(lines) < 2):
        raise StartupError("--trace: its requests come all at once; say --rate")
    own = (rate if rate is not None else (len(lines) - 1) / span) * scale
    hits = _hits(lines) if shared is None else [shared * line.prompt for line in lines]
    kept = _distinct(lines) if shared is None and any(hits) else 0
    samples = [
        Sample(float(max(1, line.prompt - hit)), float(min(hit, line.prompt - 1)), line.output)
        for line, hit in zip(lines, hits, strict=True)
        if line.prompt > 0
    ]
    samples.sort(key=lambda s: (s.uncached, s.output))
    if not samples:
        raise StartupError("--trace: no request has a prompt")
    found = Workload(told="", mix=Mix(rate=own, window_s=span, samples=_grouped(samples)))
    told = f"{name}: {len(lines)} requests, {own:.3g} requests/s, {_means(found)}"
    return msgspec.structs.replace(found, told=told, kept_tokens=kept)


def _distinct(lines: Sequence[TraceRequest]) -> int:
    """Tokens of all blocks, each counted once. The last of a prompt may not be full."""
    sizes: dict[int, int] = {}
    for line in lines:
        for i, block in enumerate(line.blocks):
            tokens = min(BLOCK_TOKENS, line.prompt - i * BLOCK_TOKENS)
            sizes[block] = max(sizes.get(block, 0), tokens)
    return sum(sizes.values())


def _hits(lines: Sequence[TraceRequest]) -> list[float]:
    """Tokens of each prompt in blocks that came before."""
    seen: set[int] = set()
    hits = []
    for line in lines:
        known = next((i for i, b in enumerate(line.blocks) if b not in seen), len(line.blocks))
        hits.append(float(min(known * BLOCK_TOKENS, line.prompt)))
        seen.update(line.blocks)
    return hits


def _grouped(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """At most MOST_SAMPLES, each the mean of neighbours in order."""
    size = math.ceil(len(samples) / MOST_SAMPLES)
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    return tuple(
        Sample(
            sum(s.uncached for s in group) / len(group),
            sum(s.cached for s in group) / len(group),
            sum(s.output for s in group) / len(group),
            float(len(group)),
        )
        for group in groups
    )


def _means(of: Workload) -> str:
    return (
        f"prompts of {of.prompt:,.0f} tokens on average, {of.shared:.0%} of them cached, answers"
        f" of {of.output:,.0f}"
    )
