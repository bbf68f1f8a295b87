"""The request mix of a window whose length follows the variance of the traffic. Pure.

A window is long enough when its tokens are known to PRECISION. A sum S of tokens with dispersion v
(variance over mean) has a relative error of sqrt(v/S); for Poisson arrivals that is
sqrt((1 + k)/n) after n requests whose lengths have a squared coefficient of variation k. So the
mix is that of the last intervals with S >= v/PRECISION^2, for prompts and for outputs: burst_s at
least, LONGEST window_s at most.

Where the tokens of the last burst_s, or of 2, 4, ... times that, differ from those before by more
than CHANGE_DEVIATIONS, what was before is no longer used. Bursts that are usual in as long a time
are no change: the deviation is that of ``arrival_dispersion``. There is no mix until the first
window is long enough, or has lasted window_s. An interval longer than burst_s is a gap: all begins
anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from cluster.observation.arrival_history import ArrivalHistory
from cluster.observation.request_lengths import LengthHistogram
from cluster.observation.request_mix import TrafficCounts, request_samples
from cluster.sizing.burstiness import arrival_dispersion, dispersion
from cluster.sizing.snapshot import ObservedLatency, RequestMix, RequestSample

BURST_INTERVALS = 3
"""``burst_s`` in intervals of the autoscaler."""
PRECISION = 0.05
CHANGE_DEVIATIONS = 5.0
"""About ten sums are compared in each of 17,000 turns a day. In constant traffic (5 requests/s, k =
1), 3.5 finds a change every 22 minutes, and the load is then that of 15 s; 5 finds none in six
hours."""
LEAST = 100
"""Requests below which lengths are those of up to LONGEST windows, or as they were last."""
LONGEST = 5
SHARE = 0.97
"""This share of a period suffices, because readings are not exactly evenly spaced."""


class SlidingWindow:
    """Add the counts of each interval with ``add``, then ask for the mix."""

    def __init__(self, window_s: float, burst_s: float) -> None:
        self._window_s, self._burst_s = window_s, burst_s
        self._counted: deque[TrafficCounts] = deque()  # the latest first
        self._alike = 0  # of these, the latest that are contiguous and without a change
        self._used = 0  # of these, the latest that the mix is made of
        self._known_s = 0.0  # since the last gap
        self._is_full = False  # whether the first window since then is
        self._samples: tuple[RequestSample, ...] = ()
        self._history = ArrivalHistory(burst_s / BURST_INTERVALS)

    def add(self, counted: TrafficCounts) -> None:
        self._counted.appendleft(counted)
        kept = self._covering(LONGEST * self._window_s)
        while len(self._counted) > kept:
            self._counted.pop()
        if counted.seconds * SHARE > self._burst_s:
            self._alike, self._known_s, self._is_full = 0, 0.0, False
            self._history.clear()
        else:
            self._alike, self._known_s = min(self._alike + 1, kept), self._known_s + counted.seconds
            self._history.add(counted.arrivals)
            self._forget_before_change()
        self._choose_length()
        self._samples = request_samples(self._lengths()) or self._samples

    def mix(self, *, backlog_tokens: float = 0.0, residents: float = 0.0) -> RequestMix | None:
        """Return the mix; None before the first window is full."""
        if not self._is_full:
            return None
        used = self._latest(self._used)
        window_s = math.fsum(c.seconds for c in used)
        return RequestMix(
            rate=math.fsum(c.arrivals for c in used) / window_s,
            window_s=window_s,
            samples=self._samples,
            backlog_tokens=backlog_tokens,
            residents=residents,
            arrivals=self._history.arrivals(window_s / len(used)),
        )

    def observed(self) -> ObservedLatency:
        """Return the latencies of the requests that the mix is made of."""
        return observed_latency(TrafficCounts.together(self._latest(self._used)))

    def _forget_before_change(self) -> None:
        alike, recent = self._latest(self._alike), self._covering(self._burst_s)
        seconds, both = [c.seconds for c in alike], _tokens(alike)
        past = self._history.arrivals(math.fsum(seconds) / len(seconds))
        longest = _longest(self._samples)
        while recent < len(alike):
            usual = token_dispersions(self._samples, arrival_dispersion(past, recent))
            each = zip(both, usual, longest, strict=True)
            if any(has_changed(*of, seconds, recent) for of in each):
                self._alike = recent
                self._history.record_change(recent)
                return
            recent *= 2

    def _choose_length(self) -> None:
        """Use as many of the alike intervals as the variance asks for."""
        alike = self._latest(self._alike)
        least = token_dispersions(self._samples)
        most = [
            dispersion(tokens, each) / PRECISION**2
            for tokens, each in zip(_tokens(alike), least, strict=True)
        ]
        needed = [tokens if tokens > 0 else math.inf for tokens in most]  # inf: nothing is known
        self._used, seconds, precise = 0, 0.0, False
        for one in alike:
            if precise and seconds >= SHARE * self._burst_s:
                break
            needed = [needed[0] - one.prompts.total, needed[1] - one.outputs.total]
            self._used, seconds, precise = self._used + 1, seconds + one.seconds, max(needed) <= 0
        full = self._known_s >= SHARE * (self._burst_s if precise else self._window_s)
        self._is_full = self._is_full or full

    def _lengths(self) -> TrafficCounts:
        """Return the histograms of the mix's requests, each over a longer time where it has too few
        values."""
        answered = self._enough(lambda c: c.uncached)
        ended = self._enough(lambda c: c.outputs)
        return TrafficCounts(
            prompts=LengthHistogram.together(c.prompts for c in self._enough(lambda c: c.prompts)),
            uncached=LengthHistogram.together(c.uncached for c in answered),
            answered_tokens=math.fsum(c.answered_tokens for c in answered),
            cached_pairs=math.fsum(c.cached_pairs for c in answered),
            passed=LengthHistogram.together(c.passed for c in ended),
            outputs=LengthHistogram.together(c.outputs for c in ended),
            ended_tokens=math.fsum(c.ended_tokens for c in ended),
            output_pairs=math.fsum(c.output_pairs for c in ended),
        )

    def _enough(self, histogram: Callable[[TrafficCounts], LengthHistogram]) -> list[TrafficCounts]:
        """Return the latest counts of which one histogram has enough values."""
        count, taken = 0.0, 0
        for one in self._counted:
            if taken >= self._used and count >= LEAST:
                break
            taken, count = taken + 1, count + histogram(one).count
        return self._latest(taken)

    def _latest(self, count: int) -> list[TrafficCounts]:
        return list(islice(self._counted, count))

    def _covering(self, seconds: float) -> int:
        """Return how many of the latest intervals cover ``seconds``: at least one."""
        passed, count = 0.0, 0
        for one in self._counted:
            if passed >= SHARE * seconds:
                break
            passed, count = passed + one.seconds, count + 1
        return count


def token_dispersions(
    samples: Sequence[RequestSample], arrivals: float = 1.0
) -> tuple[float, float]:
    """Return the dispersion of prompt and output tokens for that of arrivals, which is 1 if
    requests arrive one by one. Lengths of mean m and mean square q have q/m + (arrivals - 1)*m."""
    prompts = [(s.weight, s.uncached + s.cached) for s in samples]
    outputs = [(s.weight, s.output) for s in samples]
    first, second = (_dispersion(of, arrivals) for of in (prompts, outputs))
    return first, second


def long_enough_s(counted: TrafficCounts, samples: Sequence[RequestSample]) -> float:
    """Return the seconds of traffic as counted after which its tokens are known to PRECISION."""
    totals = (counted.prompts.total, counted.outputs.total)
    least = zip(token_dispersions(samples), totals, strict=True)
    return max(
        counted.seconds * each / (PRECISION**2 * total) if total > 0 else math.inf
        for each, total in least
    )


def _tokens(counts: Sequence[TrafficCounts]) -> tuple[list[float], list[float]]:
    return [c.prompts.total for c in counts], [c.outputs.total for c in counts]


def _dispersion(lengths: Sequence[tuple[float, float]], arrivals: float) -> float:
    """``lengths``: weights and tokens."""
    total = math.fsum(w * n for w, n in lengths)
    mean = total / max(1e-9, math.fsum(w for w, _ in lengths))
    return math.fsum(w * n * n for w, n in lengths) / max(1e-9, total) + (arrivals - 1.0) * mean


def observed_latency(counts: TrafficCounts) -> ObservedLatency:
    answered = counts.uncached.count
    return ObservedLatency(
        ttft_s=counts.ttft.value,
        tpot_s=counts.tpot.value,
        prompt_tokens=counts.answered_tokens / answered if answered > 0 else 0.0,
    )


def _longest(samples: Sequence[RequestSample]) -> tuple[float, float]:
    """Return the tokens of the longest prompt and output."""
    prompts = max((s.uncached + s.cached for s in samples), default=0.0)
    return prompts, max((s.output for s in samples), default=0.0)


def has_changed(
    tokens: Sequence[float], least: float, longest: float, seconds: Sequence[float], recent: int
) -> bool:
    """Return whether the tokens/s of the first ``recent`` intervals differ from those of the others
    by more than their dispersion explains, which is at least ``least``. A few requests of up to
    ``longest`` tokens make a sum larger more often than that of a normal variable: by Bernstein's
    inequality one of variance v is above its mean by t as rarely as a normal one of variance
    v + longest*t/3 (Boucheron, Lugosi and Massart, Concentration Inequalities, section 2.8)."""
    latest, before, latest_s, before_s = (
        math.fsum(part)
        for values in (tokens, seconds)
        for part in (values[:recent], values[recent:])
    )
    if min(latest_s, before_s) <= 0:
        return False
    difference = latest / latest_s - before / before_s
    jump = longest / (latest_s if difference > 0 else before_s)
    rate = (latest + before) / (latest_s + before_s)
    variance = dispersion(tokens, least) * rate * (1.0 / latest_s + 1.0 / before_s)
    return abs(difference) > CHANGE_DEVIATIONS * math.sqrt(variance + jump * abs(difference) / 3.0)
