"""Lists every metric that dashboards draw, with its kind, its unit and a description.

Tests compare the list with the metrics pages of a real router and of real workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
MetricUnit: TypeAlias = Literal["seconds", "bytes", "tokens", "requests", "flops", "ratio", "count"]


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` is without the suffix of its kind (``_total``, ``_bucket``, ...).

    ``labels``: its labels beside model, role and replica. ``bare``: it has only the labels that
    Prometheus adds."""

    name: str
    kind: MetricKind
    unit: MetricUnit
    about: str
    labels: tuple[str, ...] = ()
    bare: bool = False


def _counter(name: str, unit: MetricUnit, about: str, *labels: str) -> Metric:
    return Metric(f"baton_{name}", "counter", unit, about, labels)


def _gauge(name: str, unit: MetricUnit, about: str, *labels: str) -> Metric:
    return Metric(f"baton_{name}", "gauge", unit, about, labels)


def _histogram(name: str, unit: MetricUnit, about: str, *labels: str) -> Metric:
    return Metric(f"baton_{name}", "histogram", unit, about, labels)


# What clients see; measured by routers.
_ARRIVAL = "Time from the request's arrival to its"
TTFT = _histogram("time_to_first_token_seconds", "seconds", f"{_ARRIVAL} first token")
TPOT = _histogram(
    "request_time_per_output_token_seconds",
    "seconds",
    "Mean time per token of a request, after its first token",
)
ITL = _histogram("inter_token_latency_seconds", "seconds", "Time between two tokens of a request")
DURATION = _histogram("request_duration_seconds", "seconds", f"{_ARRIVAL} end")
STAGE = _histogram(
    "ttft_stage_seconds",
    "seconds",
    "Stages of the time to first token; wire and scatter come after it",
    "stage",
)
OBJECTIVE = _gauge("objective_seconds", "seconds", "The configured objective", "slo")
SLO_OF = _counter(
    "slo_requests",
    "requests",
    "Requests to which an objective applies, including those that never got a token",
    "slo",
)
SLO_MET = _counter(
    "slo_met", "requests", "Requests that met the objective; all: met both, and ended well", "slo"
)
REQUESTS = _counter("requests", "requests", "Requests ended", "status")
REFUSALS = _counter("admission_refusals", "requests", "Refused requests", "reason")
PROMPT = _counter("prompt_tokens", "tokens", "Tokens in prompts")
UNCACHED = _counter(
    "uncached_prompt_tokens", "tokens", "Prompt tokens that were in no prefix cache"
)
OUTPUT = _counter("output_tokens", "tokens", "Tokens sent to clients")
ASKED = _gauge("requests_waiting", "requests", "Requests that wait for their first token")
ANSWERED = _gauge(
    "requests_running", "requests", "Running requests that have had their first token"
)

# What is asked; told by routers.
RECEIVED = _counter(
    "requests_received",
    "requests",
    "Valid requests, counted when they arrive, refused ones included",
)
PROMPT_LENGTH = _histogram(
    "request_prompt_tokens", "tokens", "Tokens in the prompt of a request that arrived"
)
UNCACHED_LENGTH = _histogram(
    "request_uncached_prompt_tokens",
    "tokens",
    "Tokens of the prompt that were in no cache, observed with the first token",
)
OUTPUT_LENGTH = _histogram(
    "request_output_tokens", "tokens", "Tokens generated for a request, observed at its end"
)

# Routers themselves.
REPLICAS = _gauge("replicas", "count", "Workers that this router knows", "state")
DECISION = _histogram("router_decision_seconds", "seconds", "Time to choose a request's workers")
PREDICTION = _histogram(
    "router_ttft_prediction_ratio", "ratio", "Time to first token: observed over predicted"
)
INDEX_ENTRIES = _gauge("index_entries", "count", "Blocks in the prefix index")
INDEX_AGE = _gauge("index_staleness_seconds", "seconds", "Age of the data in the prefix index")

# Workers: what they have to do.
RUNNING = _gauge("requests_running", "requests", "Sequences that decode")
WAITING = _gauge("requests_waiting", "requests", "Sequences that wait: for prefill, KV or pages")
QUEUED = _gauge("queued_prefill_tokens", "tokens", "Prompt tokens yet to be computed")
DECODE_JOBS = _gauge(
    "decode_jobs",
    "requests",
    "Requests owned by this worker, including those that are queued or prefilled elsewhere",
)
PREFILL_CALLS = _gauge(
    "prefill_calls",
    "requests",
    "Prompts that this worker computes, or holds until they are fetched",
)

# Workers: what they do.
COMPUTED = _counter("prefill_computed_tokens", "tokens", "Prompt tokens computed")
GENERATED = _counter("generation_tokens", "tokens", "Tokens generated")
QUERIES = _counter(
    "prefix_cache_queries_tokens", "tokens", "Prompt tokens looked up in the prefix cache"
)
HITS = _counter("prefix_cache_hits_tokens", "tokens", "Prompt tokens found in the prefix cache")
KV_USAGE = _gauge("kv_cache_usage_ratio", "ratio", "Share of the KV pages in use")
PREEMPTIONS = _counter("num_preemptions", "count", "Preempted sequences")
RESTARTS = _counter("engine_restarts", "count", "Engines that were replaced")
STEP = _histogram("engine_step_seconds", "seconds", "Duration of a step of the engine")
BATCH = _histogram("engine_batch_size", "count", "Sequences in a step")
DRAFTED = _counter("spec_decode_num_draft_tokens", "tokens", "Tokens proposed")
ACCEPTED = _counter("spec_decode_num_accepted_tokens", "tokens", "Tokens accepted")
ROWS = _counter("decode_rows", "count", "Decoding sequences, summed over all steps")

# How far pools are from their ceilings; worked out by routers.
BINDING = _gauge("binding_wall", "count", "1: this wall binds the pool; none: none does", "wall")
WALL_USE = _gauge(
    "pool_wall_utilization_ratio",
    "ratio",
    "Share of the wall's ceiling that the pool's workers use",
    "wall",
)
BUSY = _gauge(
    "pool_busy_ratio", "ratio", "Share of the last seconds in which steps ran, on average"
)
GAIN = _gauge(
    "wall_gain_ratio",
    "ratio",
    "Expected tokens per second of the pool with a technique, over those now",
    *("wall", "technique"),
)
FLOPS = _counter("engine_flops", "flops", "Floating point operations of steps")
MOVED = _counter("engine_bytes", "bytes", "Bytes that steps moved in memory", "kind")

# KV on its way: every byte counts at its receiver alone.
_LINK = ("transport", "codec")
WIRE_BYTES = _counter("kv_transfer_bytes", "bytes", "KV received, in bytes on the wire", *_LINK)
RAW_BYTES = _counter(
    "kv_transfer_raw_bytes", "bytes", "KV received, in bytes before encoding", *_LINK
)
FAILURES = _counter("kv_transfer_failures", "count", "That broke", *_LINK)
TRANSFER = _histogram(
    "kv_transfer_seconds",
    "seconds",
    "Duration of a transfer, from the request to the last frame",
    *_LINK,
)

# The autoscaler, and what it moves.
DESIRED = _gauge("desired_replicas", "count", "Workers that are wanted, within the limits")
THERE = _gauge("actual_replicas", "count", "Workers that are present, by the role that they serve")
STARTING = _gauge(
    "starting_replicas", "count", "Workers that were requested but are not present yet"
)
NEEDED = _gauge("needed_replicas", "count", "Workers that the load needs, before limits")
POOL_LOAD = _gauge(
    "pool_load", "count", "Busy prefill workers (erlangs); sequences that decode at the same time"
)
CORRECTION = _gauge("correction_factor", "ratio", "Observed to predicted")
KV_CORRECTION = _gauge(
    "resident_kv_correction_factor", "ratio", "Observed over expected KV of a decoding sequence"
)
FORECAST_ERROR = _gauge(
    "forecast_error_ratio",
    "ratio",
    "Observed value over the value forecast a minute ago, less 1",
    "figure",
)
PREDICTED_TTFT = _gauge(
    "predicted_ttft_seconds", "seconds", "Predicted for this load with the workers that serve now"
)
PREDICTED_TPOT = _gauge(
    "predicted_tpot_seconds", "seconds", "Predicted for this load with the workers that serve now"
)
OBSERVED_TTFT = _gauge("observed_ttft_seconds", "seconds", "Observed mean over the window")
OBSERVED_TPOT = _gauge("observed_tpot_seconds", "seconds", "Observed mean over the window")
INFEASIBLE = _gauge("slo_infeasible", "count", "1: no number of workers meets the objective", "slo")
MODE = _gauge(
    "autoscaler_mode", "count", "1: the present mode; watch: another autoscaler acts", "mode"
)
REASON = _gauge("scaling_reason", "count", "1: the reason of the last decision", "reason")
READING_AGE = _gauge(
    "planner_reading_age_seconds", "seconds", "Age of the metrics behind the last decision"
)
DECISIONS = _counter("scaling_decisions", "count", "Decisions, by their main reason", "reason")
TURNS_FAILED = _counter("autoscaler_failures", "count", "Parts of turns that failed", "what")
WORKER_SECONDS = _counter(
    "worker_seconds",
    "seconds",
    "Time of all workers, from the request for a worker until it is gone",
)
FLIPS = _counter("role_flips", "count", "Changes of the worker's role", "from", "to")

# Processes: of a router, of a worker's front, and of its engine.
_CPU = "Total user and system CPU time spent in seconds."
_MEMORY = "Resident memory size in bytes."
CPU = Metric("process_cpu_seconds", "counter", "seconds", _CPU, bare=True)
MEMORY = Metric("process_resident_memory_bytes", "gauge", "bytes", _MEMORY, bare=True)
ENGINE_CPU = Metric("baton_engine_process_cpu_seconds", "counter", "seconds", _CPU, bare=True)
ENGINE_MEMORY = Metric(
    "baton_engine_process_resident_memory_bytes", "gauge", "bytes", _MEMORY, bare=True
)
