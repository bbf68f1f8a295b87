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
    "Is it fine?",
    _stat(
        "In time",
        "Requests of the last five minutes that ended well and met both objectives. Below 99%, the"
        " next row shows which of the two times is over its line, or they failed. Waiting in vain"
        " for a first token counts, refusals do not.",
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
        "TTFT p99 of SLO",
        "The 99th percentile of the time to first token, as a share of its objective.",
        _of_objective(m.TTFT, "ttft"),
        limits=palette.OF_OBJECTIVE,
        idle="idle",
    ),
    _stat(
        "TPOT p99 of SLO",
        "The 99th percentile of the time per output token, as a share of its objective.",
        _of_objective(m.TPOT, "tpot"),
        limits=palette.OF_OBJECTIVE,
        idle="idle",
    ),
    _stat(
        "Failed",
        "Requests that ended with an error of the service's own (5xx), of all.",
        _FAILED.over(rate(m.REQUESTS, window=RECENT)),
        limits=((1e-9, palette.FAIR), (0.01, palette.BAD)),
        idle="idle",
        decimals=1,
    ),
    _stat(
        "Refused",
        "Requests per second that were not let in (429): there is more to do than the workers can."
        " The dashboard of the pools shows which kind is short.",
        rate(m.REFUSALS, window=RECENT),
        limits=palette.ANY,
    ),
    _stat(
        "Workers ready",
        "As the routers know them. Without a decode worker nothing is served; without a prefill"
        " worker decode workers compute prompts themselves, more slowly.",
        max_of(m.REPLICAS, "role", match='state="ready"'),
        "{{role}}",
        calm=palette.BAD,
        limits=palette.AT_LEAST_ONE,
        idle="unknown",
    ),
    _stat(
        "Alerts",
        "Those that fire. docs/operations.md says of each what to do.",
        _FIRING,
        "{{alertname}}",
        limits=((1.0, palette.BAD),),
    ),
)


_ACCEPTANCE = rate(m.ACCEPTED, "replica").over(rate(m.DRAFTED, "replica"))
_EXTRA = rate(m.ACCEPTED, "replica").over(rate(m.ROWS, "replica"))
_PER_ROW = _EXTRA.wrapped("1 + ").with_unit("short")

ENGINES = row(
    "Are the engines well?",
    graph(
        "Time of a step",
        "On decode workers about the time per output token. p99 far above p50: prompts between"
        " decodes.",
        *((quantile(q, m.STEP, "role"), f"{{{{role}}}} p{100 * q:.0f}") for q in (0.5, 0.99)),
    ),
    graph(
        "Sequences in a step",
        "Means. Decoding is bound by memory bandwidth: more sequences in a step are nearly free,"
        " until compute or KV pages run out.",
        (mean(m.BATCH, "role"), "{{role}}"),
    ),
    bars(
        "Engines replaced",
        "An engine that died or hung is replaced by its worker's front, and its requests go on"
        " elsewhere. Again and again on one worker: its log says why.",
        (increase(m.RESTARTS, "role", "replica"), EACH_WORKER),
        decimals=0,
    ),
    graph(
        "Speculation: drafts accepted",
        "Share of the drafted tokens that were verified. Drafts get fewer by themselves where it"
        " is low.",
        (_ACCEPTANCE, "decode {{replica}}"),
        high=1.0,
    ),
    graph(
        "Speculation: tokens per step",
        "That a sequence gets of a step: 1 without speculation.",
        (_PER_ROW, "decode {{replica}}"),
        low=1.0,
        decimals=2,
    ),
    graph(
        "Speculation: drafts",
        "Tokens proposed per second, and those accepted.",
        (rate(m.DRAFTED), "proposed"),
        (rate(m.ACCEPTED), "accepted"),
        colours=(("proposed", "light-orange"), ("accepted", palette.DECODE)),
    ),
)


_EACH = "router {{replica}}"

ROUTERS = row(
    "Are the routers well?",
    graph(
        "To choose workers",
        "Time of one decision. Above some milliseconds the router is short of CPU.",
        *quantile_queries(m.DECISION),
        colours=palette.QUANTILES,
    ),
    graph(
        "TTFT, observed to predicted",
        "At 100% predictions are right. Far above, placements and refusals rest on wrong figures:"
        " workers are slower than they were when they were measured.",
        *quantile_queries(m.PREDICTION),
        colours=palette.QUANTILES,
    ),
    graph(
        "Age of the prefix index",
        "Above some seconds: Redis does not answer, or the router does not keep up. It costs hits,"
        " and no request.",
        (max_of(m.INDEX_AGE, "replica"), _EACH),
    ),
    graph(
        "Blocks in the prefix index",
        "All routers should know about as many.",
        (max_of(m.INDEX_ENTRIES, "replica"), _EACH),
    ),
    graph(
        "CPU of routers",
        "A router is one process: near 100% of a core it is full, and another one helps.",
        (rate(m.CPU, "replica", match=OF_ROUTERS), _EACH),
        limits=((0.8, palette.BAD),),
    ),
    graph(
        "Memory of routers",
        "Most of it is the prefix index, and the tokenizer.",
        (max_of(m.MEMORY, "replica", match=OF_ROUTERS), _EACH),
    ),
)


PROCESSES = row(
    "What do the workers' processes use?",
    graph(
        "CPU of engines",
        "In cores. On a GPU: one core, while it works.",
        (rate(m.ENGINE_CPU, "role", "replica"), EACH_WORKER),
    ),
    graph(
        "CPU of fronts",
        "In cores. A front is one process: near 100% it is full.",
        (rate(m.CPU, "role", "replica", match=WORKERS), EACH_WORKER),
    ),
    graph(
        "Memory",
        "Front and engine; of an engine on a CPU the weights and the KV pool are most of it.",
        (max_of(m.ENGINE_MEMORY, "role", "replica"), f"{EACH_WORKER} engine"),
        (max_of(m.MEMORY, "role", "replica", match=WORKERS), f"{EACH_WORKER} front"),
    ),
)
