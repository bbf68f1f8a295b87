"""Prometheus metrics of one router. Names and bucket edges follow vLLM's, with finer ones below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from router.generation.attempt import Attempt
from router.generation.timeline import SLOS, Times, weighed
from router.placement.snapshot import Objectives
from router.walls.binding import WallGauges

# MERGED router.buckets
# Edges of the histograms. Those in seconds are vLLM's, with finer ones below.

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
TOKENS = tuple(float(round(16 * 2 ** (i / 2))) for i in range(27))
"""16 .. 131072 tokens of a request, a factor of sqrt(2) apart: means of squares are right to some
percent then (``cluster/observation/request_lengths.py``), and a page has 28 lines for each."""


# MERGED router.demand
# What is asked of the cluster, as metrics: how many requests came, and what they are made of.
#
# arrival: received, prompt --> first token: uncached --> end: output
#
# Refused and queued requests count as they arrive: who sizes the pools must not see only what they
# could take. Each choice of a request is one.

_LABELS = ["model", "role"]


class Demand:
    """``labels``: the model, and the router's role."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._received = Counter(
            "baton_requests_received",
            "Valid requests at their arrival, refused ones included",
            _LABELS,
            registry=registry,
        ).labels(*labels)

        def histogram(name: str, text: str) -> Histogram:
            name = f"baton_request_{name}_tokens"
            metric = Histogram(name, text, _LABELS, buckets=TOKENS, registry=registry)
            return metric.labels(*labels)

        self._prompt = histogram("prompt", "Tokens in the prompt of a request that arrived")
        self._uncached = histogram(
            "uncached_prompt", "Of them, those that no cache held; known with the first token"
        )
        self._output = histogram("output", "Tokens that a request brought, at its end")

    def refused(self, requests: int) -> None:
        """So many came, and their prompts were not looked at."""
        self._received.inc(requests)

    def arrived(self, prompts: Iterable[int], choices: int) -> None:
        """``choices`` requests for each prompt of so many tokens."""
        for tokens in prompts:
            self._received.inc(choices)
            for _ in range(choices):
                self._prompt.observe(tokens)

    def computed(self, uncached: int) -> None:
        """A first token has come."""
        self._uncached.observe(uncached)

    def answered(self, tokens: int) -> None:
        """A request has ended after its first token."""
        self._output.observe(tokens)


ROLE = "router"
REPLICA_CHARS = 12  # of an instance id
_STATUSES = ("ok", "cancelled", "429", "500", "503", "504")
_WEIGHED = "Requests weighed by an objective, those that waited in vain as well"
_NO_TIMES = Times()  # it got no further than being checked
_MET = "Those of them within it; all: within both, and ended well"


class Metrics:
    """A registry of its own: several routers may live in one process. ``goals``: the buckets have
    an edge at each, so that who met them can be read off. ``replica``: the router's instance."""

    def __init__(self, model: str, goals: Objectives, replica: str = "") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model
        self._replica = replica[:REPLICA_CHARS]
        self.goals = goals
        self.walls = WallGauges(self.registry, model, self._replica)
        self.demand = Demand(self.registry, (model, ROLE))
        ttft = tuple(sorted({*TTFT, goals.ttft_s}))
        tpot = tuple(sorted({*ITL, goals.tpot_s}))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token", ttft
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request", tpot
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request, after its first", tpot
        )
        self.duration = self._histogram(
            "request_duration_seconds", "From the request's arrival to its end", DURATION
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens in prompts")
        self.uncached_prompt_tokens = self._counter(
            "uncached_prompt_tokens", "Tokens in prompts that no prefix cache held"
        )
        self.output_tokens = self._counter("output_tokens", "Tokens sent to clients")
        self.running = self._gauge("requests_running", "Requests that have brought a token")
        self.waiting = self._gauge("requests_waiting", "Requests before their first token")
        self.decode_workers = self._gauge("router_decode_workers", "Decode workers attached")
        self.decision = self._histogram(
            "router_decision_seconds", "To choose a request's workers", DECISION
        )
        self.prediction = self._histogram(
            "router_ttft_prediction_ratio",
            "Time to first token: observed to predicted",
            RATIO,
        )
        self.index_entries = self._gauge("index_entries", "Blocks in the prefix index")
        self.index_staleness = self._gauge(
            "index_staleness_seconds", "Age of what the prefix index knows"
        )
        self.cache_queries = self._counter(
            "prefix_cache_queries_tokens", "Prompt tokens looked for in prefix caches"
        )
        self.cache_hits = self._counter(
            "prefix_cache_hits_tokens", "Prompt tokens found in prefix caches"
        )
        self.queued_prefill_tokens = self._gauge(
            "queued_prefill_tokens", "Prompt tokens of this router's that are to be computed"
        )
        objectives = self._gauge_by("objective_seconds", "Of the service, as configured", "slo")
        objectives.labels(model, ROLE, "ttft").set(goals.ttft_s)
        objectives.labels(model, ROLE, "tpot").set(goals.tpot_s)
        self._stages = Histogram(
            "baton_ttft_stage_seconds",
            "Parts of the time to first token; wire and scatter come after it",
            ["model", "role", "stage"],
            buckets=ttft,
            registry=self.registry,
        )
        self._slo_of = self._by("slo_requests", _WEIGHED, "slo", SLOS)
        self._slo_met = self._by("slo_met", _MET, "slo", SLOS)
        self._requests = self._by("requests", "Requests ended", "status", _STATUSES)
        reasons = ("requests", "ttft", "queue")
        self._refusals = self._by("admission_refusals", "Requests not let in", "reason", reasons)
        self._not_after = Gauge(
            "baton_certificate_not_after_seconds",
            "When a certificate ends, in seconds since the epoch; use: between processes, or HTTPS",
            ["model", "role", "replica", "use"],
            registry=self.registry,
        )
        self._replicas = Gauge(
            "baton_replicas",
            "Workers that this router knows",
            ["model", "role", "state", "replica"],
            registry=self.registry,
        )

    def ended(self, status: str, times: Times = _NO_TIMES) -> None:
        """Count a request: ok, cancelled, or the HTTP status of its error."""
        self._requests.labels(self._model, ROLE, status).inc()
        for name, met in weighed(status, times, self.goals).items():
            self._slo_of.labels(self._model, ROLE, name).inc()
            self._slo_met.labels(self._model, ROLE, name).inc(met)

    def refused(self, reason: str) -> None:
        """Count a refusal: by the number of ``requests``, by ``ttft`` or by ``queue``."""
        self._refusals.labels(self._model, ROLE, reason).inc()

    def replicas(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Workers by role and state."""
        self._replicas.clear()
        for (role, state), count in counts.items():
            self._replicas.labels(self._model, role, state, self._replica).set(count)

    def certificate(self, use: str, ends: float | None) -> None:
        """When it ends (seconds since the epoch); None: there is none to be read."""
        if ends is not None:
            self._not_after.labels(self._model, ROLE, self._replica, use).set(ends)

    def stage(self, name: str, seconds: float) -> None:
        self._stages.labels(self._model, ROLE, name).observe(seconds)

    def routed(self, attempts: Sequence[Attempt]) -> None:
        """A request has ended; its attempts."""
        for attempt in attempts:
            self.decision.observe(attempt.placed.seconds)
        if not attempts or attempts[0].first_token_s is None:
            return
        first = attempts[0]
        assert first.first_token_s is not None
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

    def _by(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """``values``: those known beforehand start at 0, or a rate would miss the first of each."""
        labels = ["model", "role", label]
        metric = Counter(f"baton_{name}", text, labels, registry=self.registry)
        for value in values:
            metric.labels(self._model, ROLE, value)
        return metric

    def _gauge_by(self, name: str, text: str, label: str) -> Gauge:
        """Of what is the same at all routers."""
        return Gauge(f"baton_{name}", text, ["model", "role", label], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        labels = ["model", "role", "replica"]
        metric = Gauge(f"baton_{name}", text, labels, registry=self.registry)
        return metric.labels(self._model, ROLE, self._replica)
