"""A Prometheus that scrapes one router, for tests of what the autoscaler reads from it."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence

TOKENS = 100
"""Of each prompt and of each output. No prompt token is cached."""
_PART = re.compile(r'label_replace\((.*?), "asked", "(\w+)", "", ""\)')
_SECONDS = re.compile(r"(\d+)ms")


class EmulatedPrometheus:
    """Answers the autoscaler's query at the time ``now[0]``. ``loads``: (time of its begin,
    requests/s) of evenly spaced requests. There is a sample each ``scrape_s``, but none in the time
    ``without``."""

    def __init__(
        self,
        now: list[float],
        loads: Sequence[tuple[float, float]],
        *,
        without: tuple[float, float] = (0.0, 0.0),
        scrape_s: float = 5.0,
    ) -> None:
        self._now, self._scrape_s = now, scrape_s
        self._arrivals: list[float] = []
        ends = [*(begin for begin, _ in loads[1:]), 2000.0]
        for (begin, rate), end in zip(loads, ends, strict=True):
            self._arrivals += [begin + i / rate for i in range(round((end - begin) * rate))]
        times = (1.0 + scrape_s * i for i in range(round(2000.0 / scrape_s)))
        self._samples = [t for t in times if not without[0] < t < without[1]]

    def answer(self, query: str) -> dict[tuple[str, str], float]:
        """Return the values by the name of the query's part and the edge of the bucket."""
        found: dict[tuple[str, str], float | None] = {}
        for expression, name in _PART.findall(query):
            seconds = [int(ms) / 1000 for ms in _SECONDS.findall(expression)]
            if name == "age":
                found[name, ""] = self._age()
            elif name == "gap":
                found[name, ""] = 1.0 if 0 in self._counts(*seconds) else None
            elif name == "scrapes":
                found[name, ""] = max(self._counts(*seconds))
            elif name in ("arrivals", "burst"):
                found[name, ""] = self._increase(seconds[0], 1)
            elif name in ("answered", "ended") or name.endswith("s_sum"):
                found[name, ""] = self._increase(seconds[0], TOKENS)
            elif name == "output_pairs":
                found[name, ""] = self._increase(seconds[0], TOKENS**2)
            elif name in ("prompts", "uncached", "outputs"):
                found |= {(name, le): self._increase(seconds[0], 1) for le in ("128", "+Inf")}
        return {key: value for key, value in found.items() if value is not None}

    def _age(self) -> float | None:
        """Return the age of the last sample. A series has no present value after a scrape that
        failed."""
        age = self._now[0] - max(t for t in self._samples if t <= self._now[0])
        return age if age <= self._scrape_s else None

    def _counts(self, range_s: float, window_s: float, step_s: float) -> list[int]:
        """Return ``count_over_time`` with 0 for none, at each multiple of ``step_s``."""
        first, last = math.ceil((self._now[0] - window_s) / step_s), int(self._now[0] / step_s)
        ends = [step_s * i for i in range(first, last + 1)]
        return [sum(end - range_s <= t <= end for t in self._samples) for end in ends]

    def _increase(self, seconds: float, factor: int) -> float | None:
        """Return the increase as Prometheus extrapolates it: to the ends of the window where these
        are not farther from a sample than samples from each other, else by half that distance."""
        now = self._now[0]
        inside = [t for t in self._samples if now - seconds <= t <= now]
        if len(inside) < 2:
            return None
        first, last = (bisect_right(self._arrivals, t) for t in (inside[0], inside[-1]))
        span = inside[-1] - inside[0]
        usual = span / (len(inside) - 1)
        outside = (inside[0] - (now - seconds), now - inside[-1])
        added = sum(one if one < 1.1 * usual else usual / 2 for one in outside)
        return factor * (last - first) * (span + added) / span
