"""Recording rules: what dashboards and alerts ask for again and again, computed once.

    level : metric : operation over a window      baton:ttft_seconds:p99_5m{cluster, model}

Everything is summed over processes; labels that are left are those in ``by``. Where nothing was
asked for, a ratio has no value, rather than NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# MERGED cluster.monitoring.windows
# Windows of time in rules, as PromQL writes them.

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Windows:
    """``scale``: what every window and every ``for`` is multiplied by. 1 but in tests, which let
    the same expressions fire in seconds; names of rules keep the window that they have at 1."""

    scale: float = 1.0

    def __call__(self, nominal: str) -> str:
        """``5m`` as it is to be written: at least a millisecond, which is Prometheus' unit."""
        if self.scale == 1.0:
            return nominal
        return f"{max(1, round(seconds(nominal) * self.scale * 1000))}ms"


def seconds(duration: str) -> float:
    """Of a duration with one unit, like ``90s``."""
    match = re.fullmatch(r"(\d+)([smhd])", duration)
    assert match is not None, duration
    return int(match[1]) * float(_SECONDS[match[2]])


ERROR_WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Of the error ratios; alerts on burn rates pair them."""

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATENCIES = {
    "ttft": "baton_time_to_first_token_seconds",
    "tpot": "baton_request_time_per_output_token_seconds",
    "itl": "baton_inter_token_latency_seconds",
}
_FAILED = 'status=~"429|5.."'
"""Requests that Baton owed an answer: refused for load, or ended by an error of its own. What a
client did wrong, or gave up, is no failure."""


@dataclass(frozen=True)
class Recording:
    """One rule: the series ``record`` has the value of ``expr``."""

    record: str
    expr: str
    labels: dict[str, str] = field(default_factory=dict)


def recording(windows: Windows) -> list[Recording]:
    """All rules, in the order in which they are evaluated."""
    made = [*_latencies(windows), *_requests(windows)]
    for nominal in ERROR_WINDOWS:
        made += _errors(nominal, windows(nominal))
    return [*made, *_weighed(windows), *_pools(windows), *_transfers(windows)]


def rate(metric: str, window: str, by: str, match: str = "") -> str:
    """Per second, summed by ``by``."""
    return f"sum by ({by}) (rate({metric}{f'{{{match}}}' if match else ''}[{window}]))"


def ratio(part: str, whole: str) -> str:
    """No value where there is no ``whole``."""
    return f"{part}\n/\n({whole} > 0)"


def _latencies(windows: Windows) -> Iterator[Recording]:
    for name, metric in _LATENCIES.items():
        buckets = rate(f"{metric}_bucket", windows("5m"), "cluster, model, le")
        for label, q in _QUANTILES.items():
            expr = f"histogram_quantile({q}, {buckets})"
            yield Recording(f"baton:{name}_seconds:{label}_5m", f"{expr} >= 0")


def _requests(windows: Windows) -> Iterator[Recording]:
    window, of = windows("5m"), "cluster, model"
    weighed = rate("baton_slo_requests_total", window, of, 'slo="all"')
    met = rate("baton_slo_met_total", window, of, 'slo="all"')
    ended = rate("baton_requests_total", window, f"{of}, status")
    yield Recording("baton:requests:rate5m", ended)
    yield Recording("baton:goodput:rate5m", met)
    yield Recording("baton:goodput:ratio_rate5m", ratio(met, weighed))
    for tokens in ("prompt", "uncached_prompt", "output"):
        yield Recording(
            f"baton:{tokens}_tokens:rate5m", rate(f"baton_{tokens}_tokens_total", window, of)
        )


def _errors(nominal: str, window: str) -> Iterator[Recording]:
    """The share that missed an objective (``slo``: ttft, tpot, all), and that failed (success)."""
    record, of = f"baton:slo_errors:ratio_rate{nominal}", "cluster, model, slo"
    met = rate("baton_slo_met_total", window, of)
    yield Recording(record, "1 - " + ratio(met, rate("baton_slo_requests_total", window, of)))
    of = "cluster, model"
    ended = rate("baton_requests_total", window, of, 'status=~"ok|429|5.."')
    failed = f"({rate('baton_requests_total', window, of, _FAILED)} or 0 * {ended})"
    yield Recording(record, ratio(failed, ended), {"slo": "success"})


def _weighed(windows: Windows) -> Iterator[Recording]:
    """How many requests the ratios are made of: a few are no ground to wake somebody."""
    record, window = "baton:slo_requests:increase6h", windows("6h")
    of = "sum by (cluster, model, slo)"
    yield Recording(record, f"{of} (increase(baton_slo_requests_total[{window}]))")
    ended = f'increase(baton_requests_total{{status=~"ok|429|5.."}}[{window}])'
    yield Recording(record, f"sum by (cluster, model) ({ended})", {"slo": "success"})


def _pools(windows: Windows) -> Iterator[Recording]:
    """``role`` router: as routers see it; prefill and decode: as the workers' caches do."""
    window, of = windows("5m"), "cluster, model, role"
    hits = rate("baton_prefix_cache_hits_tokens_total", window, of)
    looked = rate("baton_prefix_cache_queries_tokens_total", window, of)
    accepted = rate("baton_spec_decode_num_accepted_tokens_total", window, of)
    drafted = rate("baton_spec_decode_num_draft_tokens_total", window, of)
    rows = rate("baton_decode_rows_total", window, of)
    usage = "baton_kv_cache_usage_ratio"
    yield Recording("baton:prefix_cache_hits:ratio_rate5m", ratio(hits, looked))
    yield Recording(
        "baton:generation_tokens:rate5m", rate("baton_generation_tokens_total", window, of)
    )
    yield Recording(
        "baton:prefill_tokens:rate5m", rate("baton_prefill_computed_tokens_total", window, of)
    )
    yield Recording("baton:spec_acceptance:ratio_rate5m", ratio(accepted, drafted))
    yield Recording("baton:tokens_per_row:ratio_rate5m", "1 + " + ratio(accepted, rows))
    yield Recording("baton:kv_cache_usage:avg", f"avg by ({of}) ({usage})")
    yield Recording("baton:kv_cache_usage:max", f"max by ({of}) ({usage})")


def _transfers(windows: Windows) -> Iterator[Recording]:
    window, of = windows("5m"), "cluster, model, codec"
    for kind in ("bytes", "raw_bytes"):
        metric = f"baton_kv_transfer_{kind}"
        yield Recording(f"baton:kv_transfer_{kind}:rate5m", rate(f"{metric}_total", window, of))
    buckets = rate("baton_kv_transfer_seconds_bucket", window, "cluster, model, le")
    for label, q in _QUANTILES.items():
        expr = f"histogram_quantile({q}, {buckets}) >= 0"
        yield Recording(f"baton:kv_transfer_seconds:{label}_5m", expr)
    of = "cluster, model"
    failed = rate("baton_kv_transfer_failures_total", window, of)
    whole = rate("baton_kv_transfer_seconds_count", window, of)
    yield Recording(
        "baton:kv_transfer_failures:ratio_rate5m", ratio(failed, f"({failed} + {whole})")
    )
