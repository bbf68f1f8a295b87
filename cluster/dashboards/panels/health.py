"""Is it fine? Shares and rates are of the last five minutes, and all numbers are of now: what is
gone leaves no old number behind."""

from __future__ import annotations

from functools import partial

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import palette
from cluster.dashboards.panels.promql import RECENT, Expr, increase, max_of, mean, quantile, rate
from cluster.dashboards.panels.spec import (
    EACH_WORKER,
    WORKERS,
    bars,
    graph,
    quantile_queries,
    row,
    stat,
)
from cluster.dashboards.panels.spec import ROUTERS as OF_ROUTERS

_ALERTS = 'ALERTS{alertstate="firing", alertname=~"Baton.*"}'
_NONE = 'label_replace(vector(0), "alertname", "none", "", "")'
_FIRING = Expr(f"sum by (alertname) ({_ALERTS})\nor on ()\n{_NONE}", "short", ())
_MET, _OF = (rate(metric, match='slo="all"', window=RECENT) for metric in (m.SLO_MET, m.SLO_OF))
_FAILED = rate(m.REQUESTS, match='status=~"5.."', window=RECENT).or_zero()

_stat = partial(stat, width=3)


def _of_objective(metric: m.Metric, slo: str) -> Expr:
    p99 = quantile(0.99, metric, window=RECENT)
    return p99.wrapped("(", ")").over(max_of(m.OBJECTIVE, match=f'slo="{slo}"'))


FINE = row(
    "Is the service healthy?",
    _stat(
        "In time",
        "Requests of the last five minutes that ended well and met both objectives. If it is"
        " below 99%, either requests fail or the next row shows which time exceeds its objective."
        " Requests that never got a first token count; refused requests do not.",
        _MET.over(_OF),
        calm=palette.BAD,
        limits=palette.IN_TIME,
        low=None,
        idle="idle",
        decimals=1,
    ),
    _stat(
        "Goodput",
        "Requests per second that ended well and met both objectives.",
        _MET,
        calm="blue",
    ),
    _stat(
        "TTFT p99 / SLO",
        "The 99th percentile of the time to first token, as a share of its objective.",
        _of_objective(m.TTFT, "ttft"),
        limits=palette.OF_OBJECTIVE,
        idle="idle",
    ),
    _stat(
        "TPOT p99 / SLO",
        "The 99th percentile of the time per output token, as a share of its objective.",
        _of_objective(m.TPOT, "tpot"),
        limits=palette.OF_OBJECTIVE,
        idle="idle",
    ),
    _stat(
        "Failed",
        "Share of requests that ended with an error of the service (5xx).",
        _FAILED.over(rate(m.REQUESTS, window=RECENT)),
        limits=((1e-9, palette.FAIR), (0.01, palette.BAD)),
        idle="idle",
        decimals=1,
    ),
    _stat(
        "Refused",
        "Requests per second that were refused (429): the load is more than the workers can"
        " serve. The dashboard of the pools shows which pool is short of workers.",
        rate(m.REFUSALS, window=RECENT),
        limits=palette.ANY,
    ),
    _stat(
        "Workers ready",
        "As the routers see them. Without a decode worker no request is served; without a prefill"
        " worker, decode workers compute prompts themselves, more slowly.",
        max_of(m.REPLICAS, "role", match='state="ready"'),
        "{{role}}",
        calm=palette.BAD,
        limits=palette.AT_LEAST_ONE,
        idle="unknown",
    ),
    _stat(
        "Alerts",
        "Alerts that fire. docs/operations.md has a paragraph on each.",
        _FIRING,
        "{{alertname}}",
        limits=((1.0, palette.BAD),),
    ),
)


_ACCEPTANCE = rate(m.ACCEPTED, "replica").over(rate(m.DRAFTED, "replica"))
_EXTRA = rate(m.ACCEPTED, "replica").over(rate(m.ROWS, "replica"))
_PER_ROW = _EXTRA.wrapped("1 + ").with_unit("short")

ENGINES = row(
    "Are the engines healthy?",
    graph(
        "Time of a step",
        "On decode workers this is about the time per output token. If p99 is far above p50,"
        " prompts are computed between decode steps.",
        *((quantile(q, m.STEP, "role"), f"{{{{role}}}} p{100 * q:.0f}") for q in (0.5, 0.99)),
    ),
    graph(
        "Sequences in a step",
        "Means. Decoding is bound by memory bandwidth: more sequences in a step cost nearly"
        " nothing until compute or KV pages run out.",
        (mean(m.BATCH, "role"), "{{role}}"),
    ),
    bars(
        "Engines replaced",
        "Engines that died or hung. The worker replaces its engine, and its requests continue on"
        " other workers. If one worker does so repeatedly, see its log.",
        (increase(m.RESTARTS, "role", "replica"), EACH_WORKER),
        decimals=0,
    ),
    graph(
        "Speculation: drafts accepted",
        "Share of the drafted tokens that were verified. Where it is low, fewer tokens are"
        " drafted.",
        (_ACCEPTANCE, "decode {{replica}}"),
        high=1.0,
    ),
    graph(
        "Speculation: tokens per step",
        "Tokens that a sequence gets in a step; 1 without speculation.",
        (_PER_ROW, "decode {{replica}}"),
        low=1.0,
        decimals=2,
    ),
    graph(
        "Speculation: drafts",
        "Proposed and accepted tokens per second.",
        (rate(m.DRAFTED), "proposed"),
        (rate(m.ACCEPTED), "accepted"),
        colours=(("proposed", "light-orange"), ("accepted", palette.DECODE)),
    ),
)


_EACH = "router {{replica}}"

ROUTERS = row(
    "Are the routers healthy?",
    graph(
        "To choose workers",
        "Time of one decision. More than a few milliseconds: the router lacks CPU.",
        *quantile_queries(m.DECISION),
        colours=palette.QUANTILES,
    ),
    graph(
        "TTFT, observed over predicted",
        "At 100% predictions are right. Far above that, placements and refusals are based on"
        " wrong figures: workers are slower than when they were measured.",
        *quantile_queries(m.PREDICTION),
        colours=palette.QUANTILES,
    ),
    graph(
        "Age of the prefix index",
        "More than a few seconds: Redis does not answer, or the router cannot keep up. The hit"
        " rate falls, but no request fails.",
        (max_of(m.INDEX_AGE, "replica"), _EACH),
    ),
    graph(
        "Blocks in the prefix index",
        "All routers should have about the same number.",
        (max_of(m.INDEX_ENTRIES, "replica"), _EACH),
    ),
    graph(
        "CPU of routers",
        "A router is one process: near 100% of a core it is saturated, and another router helps.",
        (rate(m.CPU, "replica", match=OF_ROUTERS), _EACH),
        limits=((0.8, palette.BAD),),
    ),
    graph(
        "Memory of routers",
        "Most of it is the prefix index and the tokenizer.",
        (max_of(m.MEMORY, "replica", match=OF_ROUTERS), _EACH),
    ),
)


PROCESSES = row(
    "What do the workers' processes use?",
    graph(
        "CPU of engines",
        "In cores. With a GPU: one core while it works.",
        (rate(m.ENGINE_CPU, "role", "replica"), EACH_WORKER),
    ),
    graph(
        "CPU of fronts",
        "In cores. A front is one process: near 100% it is saturated.",
        (rate(m.CPU, "role", "replica", match=WORKERS), EACH_WORKER),
    ),
    graph(
        "Memory",
        "Front and engine; for an engine on a CPU most of it is weights and the KV pool.",
        (max_of(m.ENGINE_MEMORY, "role", "replica"), f"{EACH_WORKER} engine"),
        (max_of(m.MEMORY, "role", "replica", match=WORKERS), f"{EACH_WORKER} front"),
    ),
)
