"""Pages with the right names and any values, as a worker that was taken over may have them."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from protocol.registry.directory import WALLS
from router.overview.overview import cluster_overview
from router.overview.prometheus_text import MetricsSnapshot, parse_page
from router.overview.scraper import ScrapeResult, TargetGroup

HISTOGRAMS = [
    f"baton_{name}"
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "ttft_stage_seconds")
]
NAMES = [
    "baton_engine_up",
    "baton_requests_running",
    "baton_kv_cache_usage_ratio",
    "baton_generation_tokens_total",
    "baton_requests_total",
    "baton_slo_met_total",
    "baton_slo_requests_total",
    "baton_objective_seconds",
    "baton_spec_decode_active",
    "baton_binding_wall",
    "baton_pool_wall_utilization_ratio",
    "process_start_time_seconds",
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
]
VALUES = ["0", "1", "-1", "NaN", "+Inf", "-Inf", "1e308", "-1e308", "1e29", "5e-324", "0.5"]
LABELS = st.dictionaries(
    st.sampled_from(["role", "slo", "status", "le", "wall", "stage", "proposer"]),
    st.sampled_from(["", "decode", "all", "ttft", "ok", "500", "NaN", "+Inf", "1", "x", *WALLS]),
)
LINES = st.lists(st.tuples(st.sampled_from(NAMES), LABELS, st.sampled_from(VALUES)), max_size=40)


def page(lines: list[tuple[str, dict[str, str], str]]) -> str:
    def line(name: str, labels: dict[str, str], value: str) -> str:
        pairs = ",".join(f'{key}="{label}"' for key, label in labels.items())
        return f"{name}{{{pairs}}} {value}\n"

    return "".join(line(*each) for each in lines)


@given(st.lists(LINES, min_size=4, max_size=4), st.sampled_from(["", "7", "9" * 40, "²"]))
def test_an_overview_takes_any_values(
    pages: list[list[tuple[str, dict[str, str], str]]], pid: str
) -> None:
    groups = [
        TargetGroup([role], {"__meta_baton_role": role, "__meta_baton_pid": pid})
        for role in ("router", "decode")
    ]
    texts = [page(lines) for lines in pages]
    before = MetricsSnapshot(0.0, {"router": parse_page(texts[0]), "decode": parse_page(texts[1])})
    now = MetricsSnapshot(30.0, {"router": parse_page(texts[2]), "decode": parse_page(texts[3])})
    for start in (None, before):
        shown = cluster_overview("", ScrapeResult(groups, now, {}), start, 1e9)
        json.loads(msgspec.json.encode(shown))
