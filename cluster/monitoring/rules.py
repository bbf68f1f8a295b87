"""Defines the recording rules: expressions that alerts need often, computed once by Prometheus.

    level : metric : operation over a window      baton:ttft_seconds:p99_5m{cluster, model}

Values are summed over processes, and keep the labels in ``by``. Without requests a ratio has no
value, rather than NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
ERROR_WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Windows of the error ratios; alerts on burn rates use pairs of them."""

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATENCIES = {
    "ttft": "baton_time_to_first_token_seconds",
    "tpot": "baton_request_time_per_output_token_seconds",
    "itl": "baton_inter_token_latency_seconds",
}
_FAILED = 'status=~"429|5.."'
"""Failures of the service: requests refused for load, or ended by an internal error. Errors and
cancellations by clients do not count."""


@dataclass(frozen=True)
class Windows:
    """Time windows of rules. ``scale`` multiplies every window and every ``for``.

    It is 1 except in tests, where the same expressions fire within seconds. Names of rules contain
    the window at scale 1."""

    scale: float = 1.0

    def __call__(self, nominal: str) -> str:
        """Return a window like ``5m`` scaled, at least 1 ms, the resolution of Prometheus."""
        if self.scale == 1.0:
            return nominal
        return f"{max(1, round(duration_seconds(nominal) * self.scale * 1000))}ms"


def duration_seconds(duration: str) -> float:
    """Return the seconds of a duration with one unit, like ``90s``."""
    match = re.fullmatch(r"(\d+)([smhd])", duration)
    assert match is not None, duration
    return int(match[1]) * float(_SECONDS[match[2]])


@dataclass(frozen=True)
class RecordingRule:
    """One rule, which records the value of ``expr`` as the series ``record``."""

    record: str
    expr: str
    labels: dict[str, str] = field(default_factory=dict)


def recording_rules(windows: Windows) -> list[RecordingRule]:
    """Return all rules in the order of evaluation."""
    made = [*_latencies(windows), *_requests(windows)]
    for nominal in ERROR_WINDOWS:
        made += _errors(nominal, windows(nominal))
    return [*made, *_request_counts(windows), *_pools(windows), *_transfers(windows)]


def rate(metric: str, window: str, by: str, match: str = "") -> str:
    """Return a rate per second, summed by the labels ``by``."""
    return f"sum by ({by}) (rate({metric}{f'{{{match}}}' if match else ''}[{window}]))"


def ratio(part: str, whole: str) -> str:
    """Return a quotient that has no value where ``whole`` is 0."""
    return f"{part}\n/\n({whole} > 0)"


def _latencies(windows: Windows) -> Iterator[RecordingRule]:
    for name, metric in _LATENCIES.items():
        buckets = rate(f"{metric}_bucket", windows("5m"), "cluster, model, le")
        for label, q in _QUANTILES.items():
            expr = f"histogram_quantile({q}, {buckets})"
            yield RecordingRule(f"baton:{name}_seconds:{label}_5m", f"{expr} >= 0")


def _requests(windows: Windows) -> Iterator[RecordingRule]:
    window, of = windows("5m"), "cluster, model"
    weighed = rate("baton_slo_requests_total", window, of, 'slo="all"')
    met = rate("baton_slo_met_total", window, of, 'slo="all"')
    ended = rate("baton_requests_total", window, f"{of}, status")
    yield RecordingRule("baton:requests:rate5m", ended)
    yield RecordingRule("baton:goodput:rate5m", met)
    yield RecordingRule("baton:goodput:ratio_rate5m", ratio(met, weighed))
    for tokens in ("prompt", "uncached_prompt", "output"):
        yield RecordingRule(
            f"baton:{tokens}_tokens:rate5m", rate(f"baton_{tokens}_tokens_total", window, of)
        )


def _errors(nominal: str, window: str) -> Iterator[RecordingRule]:
    """Yield the share of requests that missed an objective (``slo``), or failed (success)."""
    record, of = f"baton:slo_errors:ratio_rate{nominal}", "cluster, model, slo"
    met = rate("baton_slo_met_total", window, of)
    yield RecordingRule(record, "1 - " + ratio(met, rate("baton_slo_requests_total", window, of)))
    of = "cluster, model"
    ended = rate("baton_requests_total", window, of, 'status=~"ok|429|5.."')
    failed = f"({rate('baton_requests_total', window, of, _FAILED)} or 0 * {ended})"
    yield RecordingRule(record, ratio(failed, ended), {"slo": "success"})


def _request_counts(windows: Windows) -> Iterator[RecordingRule]:
    """Yield the number of requests behind the ratios; alerts ignore ratios of a few requests."""
    record, window = "baton:slo_requests:increase6h", windows("6h")
    of = "sum by (cluster, model, slo)"
    yield RecordingRule(record, f"{of} (increase(baton_slo_requests_total[{window}]))")
    ended = f'increase(baton_requests_total{{status=~"ok|429|5.."}}[{window}])'
    yield RecordingRule(record, f"sum by (cluster, model) ({ended})", {"slo": "success"})


def _pools(windows: Windows) -> Iterator[RecordingRule]:
    """Yield rules per role; cache hits exist as seen by routers and by the workers' caches."""
    window, of = windows("5m"), "cluster, model, role"
    hits = rate("baton_prefix_cache_hits_tokens_total", window, of)
    looked = rate("baton_prefix_cache_queries_tokens_total", window, of)
    accepted = rate("baton_spec_decode_num_accepted_tokens_total", window, of)
    drafted = rate("baton_spec_decode_num_draft_tokens_total", window, of)
    rows = rate("baton_decode_rows_total", window, of)
    usage = "baton_kv_cache_usage_ratio"
    yield RecordingRule("baton:prefix_cache_hits:ratio_rate5m", ratio(hits, looked))
    yield RecordingRule(
        "baton:generation_tokens:rate5m", rate("baton_generation_tokens_total", window, of)
    )
    yield RecordingRule(
        "baton:prefill_tokens:rate5m", rate("baton_prefill_computed_tokens_total", window, of)
    )
    yield RecordingRule("baton:spec_acceptance:ratio_rate5m", ratio(accepted, drafted))
    yield RecordingRule("baton:tokens_per_row:ratio_rate5m", "1 + " + ratio(accepted, rows))
    yield RecordingRule("baton:kv_cache_usage:avg", f"avg by ({of}) ({usage})")
    yield RecordingRule("baton:kv_cache_usage:max", f"max by ({of}) ({usage})")


def _transfers(windows: Windows) -> Iterator[RecordingRule]:
    window, of = windows("5m"), "cluster, model, codec"
    for kind in ("bytes", "raw_bytes"):
        metric = f"baton_kv_transfer_{kind}"
        yield RecordingRule(f"baton:kv_transfer_{kind}:rate5m", rate(f"{metric}_total", window, of))
    buckets = rate("baton_kv_transfer_seconds_bucket", window, "cluster, model, le")
    for label, q in _QUANTILES.items():
        expr = f"histogram_quantile({q}, {buckets}) >= 0"
        yield RecordingRule(f"baton:kv_transfer_seconds:{label}_5m", expr)
    of = "cluster, model"
    failed = rate("baton_kv_transfer_failures_total", window, of)
    whole = rate("baton_kv_transfer_seconds_count", window, of)
    yield RecordingRule(
        "baton:kv_transfer_failures:ratio_rate5m", ratio(failed, f"({failed} + {whole})")
    )
