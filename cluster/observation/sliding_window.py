"""The request mix of a sliding window. Pure.

rate      of the last window_s; burst_rate of the last burst_s
lengths   of the last ENOUGH requests, so that a busy cluster notices a change at once; at
          least of burst_s, at most of the window; where it had fewer than LEAST, of up to
          MEMORY windows; where these had none, as they were last
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from cluster.observation.request_lengths import LengthHistogram
from cluster.observation.request_mix import RunningMean, TrafficCounts, request_samples
from cluster.sizing.snapshot import ObservedLatency, RequestMix, RequestSample

BURST_INTERVALS = 3
"""``burst_s`` in intervals of the autoscaler."""
ENOUGH = 1000
LEAST = 20
MEMORY = 10
SHARE = 0.97
"""This share of a period suffices, because readings are not exactly evenly spaced."""


class SlidingWindow:
    """Add the counts of each interval with ``add``, then ask for the mix."""

    def __init__(self, window_s: float, burst_s: float) -> None:
        self._window_s, self._burst_s = window_s, burst_s
        self._counted: deque[TrafficCounts] = deque()  # the latest first
        self._samples: tuple[RequestSample, ...] = ()

    def add(self, counted: TrafficCounts) -> None:
        self._counted.appendleft(counted)
        kept = sum(1 for _ in self._last(MEMORY * self._window_s))
        while len(self._counted) > kept:
            self._counted.pop()
        self._samples = request_samples(self._of_enough()) or self._samples

    def mix(
        self, *, pace: float = 1.0, backlog_tokens: float = 0.0, residents: float = 0.0
    ) -> RequestMix | None:
        """Return the mix; None before anything was added."""
        window_s, rate = self._rate(self._window_s)
        burst_s, burst_rate = self._rate(self._burst_s)
        if window_s <= 0:
            return None
        return RequestMix(
            rate=rate,
            window_s=window_s,
            samples=self._samples,
            burst_rate=burst_rate,
            burst_s=burst_s,
            pace=pace,
            backlog_tokens=backlog_tokens,
            residents=residents,
        )

    def observed(self) -> ObservedLatency:
        window = list(self._last(self._window_s))
        ttft, tpot = (
            RunningMean.together(m) for m in ((c.ttft for c in window), (c.tpot for c in window))
        )
        return ObservedLatency(ttft_s=ttft.value, tpot_s=tpot.value)

    def _rate(self, seconds: float) -> tuple[float, float]:
        """Return the seconds that the rate covers, and the arrivals per second."""
        counts = list(self._last(seconds))
        passed = math.fsum(c.seconds for c in counts)
        return passed, math.fsum(c.arrivals for c in counts) / passed if passed > 0 else 0.0

    def _of_enough(self) -> TrafficCounts:
        answered = self._enough(lambda c: c.uncached)
        return TrafficCounts(
            prompts=LengthHistogram.together(c.prompts for c in self._enough(lambda c: c.prompts)),
            uncached=LengthHistogram.together(c.uncached for c in answered),
            answered_tokens=math.fsum(c.answered_tokens for c in answered),
            outputs=LengthHistogram.together(c.outputs for c in self._enough(lambda c: c.outputs)),
        )

    def _enough(self, histogram: Callable[[TrafficCounts], LengthHistogram]) -> list[TrafficCounts]:
        """Return the latest counts of which one histogram has enough values."""
        seconds = count = 0.0
        taken = 0
        for one in self._counted:
            full = seconds >= SHARE * self._window_s and count >= LEAST
            if full or (seconds >= SHARE * self._burst_s and count >= ENOUGH):
                break
            taken, seconds, count = taken + 1, seconds + one.seconds, count + histogram(one).count
        return list(islice(self._counted, taken))

    def _last(self, seconds: float) -> Iterable[TrafficCounts]:
        """Yield the counts of the last ``seconds``: whole intervals, and at least one."""
        passed = 0.0
        for one in self._counted:
            if passed >= SHARE * seconds:
                return
            passed += one.seconds
            yield one
