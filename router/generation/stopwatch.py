"""The stopwatch of one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from router.generation.attempt import Attempt
from router.generation.metrics import Metrics
from router.generation.timeline import Times, stages


class Meter:
    """``arrived``: on ``clock``. ``prompt``: tokens."""

    def __init__(
        self,
        metrics: Metrics,
        arrived: float,
        prompt: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._prompt = prompt
        self._clock = clock
        self._first = self._last = 0.0
        self._tokens = 0
        self._complete = False
        metrics.waiting.inc()

    def tokens(self, count: int, cached: int) -> None:
        """Tokens have come, ``cached`` of the prompt's were not computed. Of those that came
        together, each counts an equal part of the time."""
        if not count:
            return
        now = self._clock()
        if not self._tokens:
            self._first = self._last = now
            self._metrics.time_to_first_token.observe(now - self._arrived)
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._computed(cached)
            steps = 0  # those that came with the first have no time of their own
        else:
            steps = count
        for _ in range(steps):
            self._metrics.inter_token_latency.observe((now - self._last) / steps)
        self._tokens += count
        self._last = now

    def complete(self) -> None:
        """No more tokens are to come, though other choices may go on."""
        self._complete = True

    def _computed(self, cached: int) -> None:
        """Not before the first token is it known what was."""
        metrics, prompt = self._metrics, self._prompt
        metrics.prompt_tokens.inc(prompt)
        metrics.uncached_prompt_tokens.inc(prompt - cached)
        metrics.cache_queries.inc(prompt)
        metrics.cache_hits.inc(cached)
        metrics.demand.computed(prompt - cached)

    def ended(self, status: str, attempts: Sequence[Attempt]) -> None:
        """``status``: ok, cancelled, or the HTTP status of its error; to be called once."""
        metrics, now = self._metrics, self._clock()
        metrics.routed(attempts)
        first_s = self._first - self._arrived if self._tokens else None
        (metrics.waiting if first_s is None else metrics.running).dec()
        metrics.duration.observe(now - self._arrived)
        metrics.output_tokens.inc(self._tokens)
        if first_s is not None:
            metrics.demand.answered(self._tokens)
            for name, seconds in stages(self._arrived, first_s, attempts).items():
                metrics.stage(name, seconds)
        is_due = status != "ok" and not self._complete
        metrics.ended(status, Times(now - self._arrived, first_s, self._tpot_s(now, is_due)))

    def _tpot_s(self, now: float, is_due: bool) -> float | None:
        """Mean seconds of the tokens after the first. ``is_due``: one more is waited for, and
        counts as soon as the mean would miss the objective if it came now."""
        mean = None
        if self._tokens > 1:
            mean = (self._last - self._first) / (self._tokens - 1)
            self._metrics.time_per_output_token.observe(mean)
        if is_due and self._tokens:
            at_least = (now - self._first) / self._tokens
            return at_least if at_least > self._metrics.goals.tpot_s else mean
        return mean
