"""What was counted lately, as a mix: rates of a window, lengths of enough requests. Pure.

rate      of the last ``window_s``; ``burst_rate`` of the last ``burst_s``
lengths   of the last ENOUGH requests, so that a busy cluster sees at once that others come; of
          ``burst_s`` at least, and of the window at most; where it had fewer than LEAST, of up
          to MEMORY windows; where these had none, as they were last
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from cluster.observation.request_lengths import Histogram
from cluster.observation.request_mix import Counted, Mean, samples
from cluster.sizing.snapshot import Mix, Observed, Sample

BURST_LOOKS = 3
"""``burst_s`` is so many intervals of the autoscaler."""
ENOUGH = 1000
LEAST = 20
MEMORY = 10
SHARE = 0.97
"""Of a window is enough: looks are not exactly as far apart as they should be."""


class Sliding:
    """``add`` what came since the last one, then ask."""

    def __init__(self, window_s: float, burst_s: float) -> None:
        self._window_s, self._burst_s = window_s, burst_s
        self._counted: deque[Counted] = deque()  # the latest first
        self._samples: tuple[Sample, ...] = ()

    def add(self, counted: Counted) -> None:
        self._counted.appendleft(counted)
        kept = sum(1 for _ in self._last(MEMORY * self._window_s))
        while len(self._counted) > kept:
            self._counted.pop()
        self._samples = samples(self._of_enough()) or self._samples

    def mix(
        self, *, pace: float = 1.0, backlog_tokens: float = 0.0, residents: float = 0.0
    ) -> Mix | None:
        """None before anything was added."""
        window_s, rate = self._rate(self._window_s)
        burst_s, burst_rate = self._rate(self._burst_s)
        if window_s <= 0:
            return None
        return Mix(
            rate=rate,
            window_s=window_s,
            samples=self._samples,
            burst_rate=burst_rate,
            burst_s=burst_s,
            pace=pace,
            backlog_tokens=backlog_tokens,
            residents=residents,
        )

    def observed(self) -> Observed:
        window = list(self._last(self._window_s))
        ttft, tpot = (
            Mean.together(m) for m in ((c.ttft for c in window), (c.tpot for c in window))
        )
        return Observed(ttft_s=ttft.value, tpot_s=tpot.value)

    def _rate(self, seconds: float) -> tuple[float, float]:
        """Seconds that it is of, and arrivals in one of them."""
        of = list(self._last(seconds))
        passed = math.fsum(c.seconds for c in of)
        return passed, math.fsum(c.arrivals for c in of) / passed if passed > 0 else 0.0

    def _of_enough(self) -> Counted:
        answered = self._enough(lambda c: c.uncached)
        return Counted(
            prompts=Histogram.together(c.prompts for c in self._enough(lambda c: c.prompts)),
            uncached=Histogram.together(c.uncached for c in answered),
            answered_tokens=math.fsum(c.answered_tokens for c in answered),
            outputs=Histogram.together(c.outputs for c in self._enough(lambda c: c.outputs)),
        )

    def _enough(self, of: Callable[[Counted], Histogram]) -> list[Counted]:
        """Those of the last while, so that one of their histograms has values enough."""
        seconds = count = 0.0
        taken = 0
        for one in self._counted:
            full = seconds >= SHARE * self._window_s and count >= LEAST
            if full or (seconds >= SHARE * self._burst_s and count >= ENOUGH):
                break
            taken, seconds, count = taken + 1, seconds + one.seconds, count + of(one).count
        return list(islice(self._counted, taken))

    def _last(self, seconds: float) -> Iterable[Counted]:
        """What makes up the last ``seconds``, whole looks at a time, and one at least."""
        passed = 0.0
        for one in self._counted:
            if passed >= SHARE * seconds:
                return
            passed += one.seconds
            yield one
