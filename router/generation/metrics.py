"""Prometheus metrics of one router.

``RouterMetrics`` holds all series; ``DemandMetrics`` those of arriving requests; ``ChoiceMetrics``
is the stopwatch of one choice. Names and bucket edges follow vLLM's, with more edges at
short times.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from router.fairness.queue_metrics import QueueMetrics
from router.generation.submission import SLOS, RequestTimes, Submission, slo_verdicts, ttft_stages
from router.placement.snapshot import Objectives
from router.walls.binding import WallGauges

TTFT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
DURATION = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
DECISION = (*(25e-6, 50e-6, 1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1),)
RATIO = (*(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),)
TOKEN_BUCKETS = tuple(float(round(16 * 2 ** (i / 2))) for i in range(27))
"""Edges from 16 to 131072 tokens, a factor of sqrt(2) apart. Means of squares computed from them
are right to a few percent (``cluster/observation/request_lengths.py``), at 28 lines per page."""


def passed_edges(before: int, now: int) -> tuple[float, ...]:
    """Return the edges that an output passes as it grows from ``before`` to ``now`` tokens. A
    length at an edge belongs to the bucket below it, and has not passed it."""
    return TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, before) : bisect_left(TOKEN_BUCKETS, now)]


_LABELS = ["model", "role"]


class DemandMetrics:
    """Load that clients put on the cluster: number of requests and their lengths.

    at arrival: received, prompt --> at the first token: uncached --> passed --> at the end: output

    Refused and queued requests count when they arrive, because the pools must not be sized by
    what they could accept. Each choice counts as one request. ``labels``: model and role.
    """

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._received = Counter(
            "baton_requests_received",
            "Valid requests, counted when they arrive, refused ones included",
            _LABELS,
            registry=registry,
        ).labels(*labels)

        def histogram(name: str, text: str) -> Histogram:
            name = f"baton_request_{name}_tokens"
            metric = Histogram(name, text, _LABELS, buckets=TOKEN_BUCKETS, registry=registry)
            return metric.labels(*labels)

        self._prompt = histogram("prompt", "Tokens in the prompt of a request that arrived")
        self._uncached = histogram(
            "uncached_prompt",
            "Tokens of the prompt that were in no cache, observed with the first token",
        )
        self._passed = histogram(
            "passed_output",
            "Edges of the buckets, observed as an output becomes longer: of outputs that began"
            " lately, the short ones alone have ended",
        )
        self._output = histogram("output", "Tokens generated for a request, observed at its end")
        self._cached_pairs = Counter(
            "baton_prompt_cached_pairs",
            "Pairs of an uncached and a cached token of a prompt, counted with its first token:"
            " the attention that a cached prefix does not save",
            _LABELS,
            registry=registry,
        ).labels(*labels)
        self._ended_prompts = Counter(
            "baton_ended_prompt_tokens",
            "Tokens in the prompts of requests that got a token, counted at their end",
            _LABELS,
            registry=registry,
        ).labels(*labels)
        self._output_pairs = Counter(
            "baton_prompt_output_pairs",
            "Pairs of a prompt's token and a token generated for it, counted at the request's end:"
            " for how many steps a decode worker held the KV of the prompt",
            _LABELS,
            registry=registry,
        ).labels(*labels)

    def count_refused(self, requests: int) -> None:
        """Count requests that were refused before their prompts were read."""
        self._received.inc(requests)

    def count_arrived(self, prompts: Iterable[int], choices: int) -> None:
        """Count ``choices`` requests for each length in ``prompts`` (tokens)."""
        for tokens in prompts:
            self._received.inc(choices)
            for _ in range(choices):
                self._prompt.observe(tokens)

    def observe_cached(self, prompt: int, cached: int) -> None:
        """Count a prompt of which the first token has come, in tokens."""
        self._uncached.observe(prompt - cached)
        self._cached_pairs.inc((prompt - cached) * cached)

    def observe_growth(self, before: int, now: int) -> None:
        """Count an output that has grown from ``before`` to ``now`` tokens."""
        for edge in passed_edges(before, now):
            self._passed.observe(edge)

    def observe_output(self, prompt: int, tokens: int) -> None:
        """Count a request that has ended, in tokens."""
        self._output.observe(tokens)
        self._ended_prompts.inc(prompt)
        self._output_pairs.inc(prompt * tokens)


ROLE = "router"
REPLICA_CHARS = 12  # of an instance id
_STATUSES = ("ok", "cancelled", "429", "500", "503", "504")
_SLO_REQUESTS_HELP = (
    "Requests to which an objective applies, including those that never got a token"
)
_NO_TIMES = RequestTimes()  # of a request that was refused
_SLO_MET_HELP = "Requests that met the objective; all: met both, and ended well"


class RouterMetrics:
    """All metrics of one router, in its own registry: a process may hold several routers.

    ``goals``: histograms have an edge at each objective, so that the share of requests within it
    can be read off. ``replica``: the router's instance.
    """

    def __init__(self, model: str, goals: Objectives, replica: str = "") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model
        self._replica = replica[:REPLICA_CHARS]
        self.goals = goals
        self.walls = WallGauges(self.registry, model, self._replica)
        self.demand = DemandMetrics(self.registry, (model, ROLE))
        self.queue = QueueMetrics(self.registry, (model, ROLE), self._replica)
        ttft = tuple(sorted({*TTFT, goals.ttft_s}))
        tpot = tuple(sorted({*ITL, goals.tpot_s}))
        self._add_request_metrics(ttft, tpot)
        self._add_routing_metrics()
        self._add_objective_metrics(ttft)
        self._add_event_counts()

    def _add_request_metrics(self, ttft: tuple[float, ...], tpot: tuple[float, ...]) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from the request's arrival to its first token",
            ttft,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request", tpot
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a request, after its first token",
            tpot,
        )
        self.duration = self._histogram(
            "request_duration_seconds", "Time from the request's arrival to its end", DURATION
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens in prompts")
        self.uncached_prompt_tokens = self._counter(
            "uncached_prompt_tokens", "Prompt tokens that were in no prefix cache"
        )
        self.output_tokens = self._counter("output_tokens", "Tokens sent to clients")
        self.running = self._gauge(
            "requests_running", "Running requests that have had their first token"
        )
        self.waiting = self._gauge("requests_waiting", "Requests that wait for their first token")

    def _add_routing_metrics(self) -> None:
        self.decode_workers = self._gauge("router_decode_workers", "Connected decode workers")
        self.decision = self._histogram(
            "router_decision_seconds", "Time to choose a request's workers", DECISION
        )
        self.prediction = self._histogram(
            "router_ttft_prediction_ratio",
            "Time to first token: observed over predicted",
            RATIO,
        )
        self.index_entries = self._gauge("index_entries", "Blocks in the prefix index")
        self.index_staleness = self._gauge(
            "index_staleness_seconds", "Age of the data in the prefix index"
        )
        self.cache_queries = self._counter(
            "prefix_cache_queries_tokens", "Prompt tokens looked up in prefix caches"
        )
        self.cache_hits = self._counter(
            "prefix_cache_hits_tokens", "Prompt tokens found in prefix caches"
        )
        self.queued_prefill_tokens = self._gauge(
            "queued_prefill_tokens",
            "Prompt tokens of this router's requests that have yet to be computed",
        )

    def _add_objective_metrics(self, ttft: tuple[float, ...]) -> None:
        objectives = Gauge(
            "baton_objective_seconds",
            "The configured objective",
            ["model", "role", "slo"],
            registry=self.registry,
        )
        objectives.labels(self._model, ROLE, "ttft").set(self.goals.ttft_s)
        objectives.labels(self._model, ROLE, "tpot").set(self.goals.tpot_s)
        self._stages = Histogram(
            "baton_ttft_stage_seconds",
            "Stages of the time to first token; wire and scatter come after it",
            ["model", "role", "stage"],
            buckets=ttft,
            registry=self.registry,
        )
        self._slo_requests = self._counter_by("slo_requests", _SLO_REQUESTS_HELP, "slo", SLOS)
        self._slo_met = self._counter_by("slo_met", _SLO_MET_HELP, "slo", SLOS)

    def _add_event_counts(self) -> None:
        self._requests = self._counter_by("requests", "Requests ended", "status", _STATUSES)
        reasons = ("requests", "ttft", "queue")
        self._refusals = self._counter_by(
            "admission_refusals", "Refused requests", "reason", reasons
        )
        self._not_after = Gauge(
            "baton_certificate_not_after_seconds",
            "Time at which a certificate expires, in seconds since the epoch; use: cluster"
            " (between processes) or https",
            ["model", "role", "replica", "use"],
            registry=self.registry,
        )
        self._replicas = Gauge(
            "baton_replicas",
            "Workers that this router knows",
            ["model", "role", "state", "replica"],
            registry=self.registry,
        )

    def count_request(self, status: str, times: RequestTimes = _NO_TIMES) -> None:
        """Count an ended request. ``status``: ok, cancelled, or the HTTP status of its error."""
        self._requests.labels(self._model, ROLE, status).inc()
        for name, met in slo_verdicts(status, times, self.goals).items():
            self._slo_requests.labels(self._model, ROLE, name).inc()
            self._slo_met.labels(self._model, ROLE, name).inc(met)

    def count_refusal(self, reason: str) -> None:
        """Count a refusal by admission. ``reason``: requests, ttft or queue."""
        self._refusals.labels(self._model, ROLE, reason).inc()

    def set_replicas(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the numbers of workers by (role, state)."""
        self._replicas.clear()
        for (role, state), count in counts.items():
            self._replicas.labels(self._model, role, state, self._replica).set(count)

    def set_certificate_end(self, use: str, ends: float | None) -> None:
        """Set when a certificate ends (seconds since the epoch); None: there is none."""
        if ends is not None:
            self._not_after.labels(self._model, ROLE, self._replica, use).set(ends)

    def observe_stage(self, name: str, seconds: float) -> None:
        self._stages.labels(self._model, ROLE, name).observe(seconds)

    def observe_submissions(self, submissions: Sequence[Submission]) -> None:
        """Observe decision times and the TTFT prediction of an ended choice."""
        for submission in submissions:
            self.decision.observe(submission.placed.seconds)
        first = submissions[0] if submissions else None
        if first is None or first.first_token_s is None:
            return
        self.prediction.observe(first.first_token_s / max(1e-6, first.chosen.ttft_s))

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ["model", "role"]
        metric = Histogram(f"baton_{name}", text, labels, buckets=buckets, registry=self.registry)
        return metric.labels(self._model, ROLE)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"baton_{name}", text, ["model", "role"], registry=self.registry)
        return metric.labels(self._model, ROLE)

    def _counter_by(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        # Values known beforehand start at 0: a rate would miss the first event of each otherwise.
        labels = ["model", "role", label]
        metric = Counter(f"baton_{name}", text, labels, registry=self.registry)
        for value in values:
            metric.labels(self._model, ROLE, value)
        return metric

    def _gauge(self, name: str, text: str) -> Gauge:
        labels = ["model", "role", "replica"]
        metric = Gauge(f"baton_{name}", text, labels, registry=self.registry)
        return metric.labels(self._model, ROLE, self._replica)


class ChoiceMetrics:
    """Stopwatch of one choice; its ``ChoiceStream`` reports each event once.

    ``arrived`` is a time of ``clock`` in seconds, ``prompt`` a number of tokens.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
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

    def record_tokens(self, count: int, cached: int) -> None:
        """Record ``count`` output tokens; ``cached`` prompt tokens came from a prefix cache.

        Tokens that came together share the time since the previous ones equally. Those that came
        with the first token have no time between tokens.
        """
        if not count:
            return
        now = self._clock()
        if not self._tokens:
            self._first = self._last = now
            self._metrics.time_to_first_token.observe(now - self._arrived)
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._record_prompt(cached)
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._metrics.demand.observe_growth(self._tokens, self._tokens + count)
        self._tokens += count
        self._last = now

    @property
    def first_token_at(self) -> float | None:
        """When the first tokens were recorded, on the clock; None: there were none."""
        return self._first if self._tokens else None

    @property
    def last_token_at(self) -> float:
        """When the last tokens were recorded, on the clock."""
        return self._last

    def record_completion(self) -> None:
        """Record that this choice is complete; other choices may go on."""
        self._complete = True

    def _record_prompt(self, cached: int) -> None:
        metrics, prompt = self._metrics, self._prompt
        metrics.prompt_tokens.inc(prompt)
        metrics.uncached_prompt_tokens.inc(prompt - cached)
        metrics.cache_queries.inc(prompt)
        metrics.cache_hits.inc(cached)
        metrics.demand.observe_cached(prompt, cached)

    def record_end(self, status: str, submissions: Sequence[Submission]) -> None:
        """Record the end. ``status``: ok, cancelled, or the HTTP status of its error. Call once."""
        metrics, now = self._metrics, self._clock()
        metrics.observe_submissions(submissions)
        first_s = self._first - self._arrived if self._tokens else None
        (metrics.waiting if first_s is None else metrics.running).dec()
        metrics.duration.observe(now - self._arrived)
        metrics.output_tokens.inc(self._tokens)
        if first_s is not None:
            metrics.demand.observe_output(self._prompt, self._tokens)
            for name, seconds in ttft_stages(self._arrived, first_s, submissions).items():
                metrics.observe_stage(name, seconds)
        is_due = status != "ok" and not self._complete
        times = RequestTimes(now - self._arrived, first_s, self._tpot_s(now, is_due))
        metrics.count_request(status, times)

    def _tpot_s(self, now: float, is_due: bool) -> float | None:
        """Return the mean seconds per token after the first; None without such tokens.

        ``is_due``: another token is being waited for. It counts as soon as the mean would miss the
        objective if it came now.
        """
        mean = None
        if self._tokens > 1:
            mean = (self._last - self._first) / (self._tokens - 1)
            self._metrics.time_per_output_token.observe(mean)
        if is_due and self._tokens:
            at_least = (now - self._first) / self._tokens
            return at_least if at_least > self._metrics.goals.tpot_s else mean
        return mean
