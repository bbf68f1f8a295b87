"""Is it fine? Shares and rates are of the last five minutes, and all numbers are of now: what is
gone leaves no old number behind."""

from __future__ import annotations

from functools import partial

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import look
from cluster.dashboards.panels.promql import RECENT, Expr, grown, highest, mean, quantile, rate
from cluster.dashboards.panels.spec import EACH_WORKER, WORKERS, Panel, Query, Row, number, spread
from cluster.dashboards.panels.spec import ROUTERS as OF_ROUTERS

_ALERTS = 'ALERTS{alertstate="firing", alertname=~"Baton.*"}'
_NONE = 'label_replace(vector(0), "alertname", "none", "", "")'
_FIRING = Expr(f"sum by (alertname) ({_ALERTS})\nor on ()\n{_NONE}", "short", ())
_MET, _OF = (rate(metric, match='slo="all"', window=RECENT) for metric in (m.SLO_MET, m.SLO_OF))
_FAILED = rate(m.REQUESTS, match='status=~"5.."', window=RECENT).or_zero()

_number = partial(number, width=3)


def _of_objective(metric: m.Metric, slo: str) -> Expr:
    p99 = quantile(0.99, metric, window=RECENT)
    return Expr(f"({p99.text})", p99.unit, p99.uses).over(
        highest(m.OBJECTIVE, match=f'slo="{slo}"')
    )


FINE = Row(
    "Is it fine?",
    (
        _number(
            "In time",
            "Requests of the last five minutes that ended well and met both objectives. Below 99%,"
            " the next row shows which of the two times is over its line, or they failed. Waiting"
            " in vain for a first token counts, refusals do not.",
            _MET.over(_OF),
            calm=look.BAD,
            limits=look.IN_TIME,
            low=None,
            idle="idle",
            decimals=1,
        ),
        _number(
            "Goodput",
            "Requests per second that ended well and met both objectives.",
            _MET,
            calm="blue",
        ),
        _number(
            "TTFT p99 of SLO",
            "The 99th percentile of the time to first token, as a share of its objective.",
            _of_objective(m.TTFT, "ttft"),
            limits=look.OF_OBJECTIVE,
            idle="idle",
        ),
        _number(
            "TPOT p99 of SLO",
            "The 99th percentile of the time per output token, as a share of its objective.",
            _of_objective(m.TPOT, "tpot"),
            limits=look.OF_OBJECTIVE,
            idle="idle",
        ),
        _number(
            "Failed",
            "Requests that ended with an error of the service's own (5xx), of all.",
            _FAILED.over(rate(m.REQUESTS, window=RECENT)),
            limits=((1e-9, look.FAIR), (0.01, look.BAD)),
            idle="idle",
            decimals=1,
        ),
        _number(
            "Refused",
            "Requests per second that were not let in (429): there is more to do than the workers"
            " can. The dashboard of the pools shows which kind is short.",
            rate(m.REFUSALS, window=RECENT),
            limits=look.ANY,
        ),
        _number(
            "Workers ready",
            "As the routers know them. Without a decode worker nothing is served; without a"
            " prefill worker decode workers compute prompts themselves, more slowly.",
            highest(m.REPLICAS, "role", match='state="ready"'),
            "{{role}}",
            calm=look.BAD,
            limits=look.AT_LEAST_ONE,
            idle="unknown",
        ),
        _number(
            "Alerts",
            "Those that fire. docs/operations.md says of each what to do.",
            _FIRING,
            "{{alertname}}",
            limits=((1.0, look.BAD),),
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.engines
# Are the engines well?

_ACCEPTANCE = rate(m.ACCEPTED, "replica").over(rate(m.DRAFTED, "replica"))
_EXTRA = rate(m.ACCEPTED, "replica").over(rate(m.ROWS, "replica"))
_PER_ROW = Expr(f"1 + {_EXTRA.text}", "short", _EXTRA.uses)

ENGINES = Row(
    "Are the engines well?",
    (
        Panel(
            "Time of a step",
            "On decode workers about the time per output token. p99 far above p50: prompts"
            " between decodes.",
            tuple(
                Query(quantile(q, m.STEP, "role"), f"{{{{role}}}} p{100 * q:.0f}")
                for q in (0.5, 0.99)
            ),
            colours=look.ROLES,
        ),
        Panel(
            "Sequences in a step",
            "Means. Decoding is bound by memory bandwidth: more sequences in a step are nearly"
            " free, until compute or KV pages run out.",
            (Query(mean(m.BATCH, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
        Panel(
            "Engines replaced",
            "An engine that died or hung is replaced by its worker's front, and its requests go on"
            " elsewhere. Again and again on one worker: its log says why.",
            (Query(grown(m.RESTARTS, "role", "replica"), EACH_WORKER),),
            "bars",
            colours=look.ROLES,
            decimals=0,
        ),
        Panel(
            "Speculation: drafts accepted",
            "Share of the drafted tokens that were verified. Drafts get fewer by themselves where"
            " it is low.",
            (Query(_ACCEPTANCE, "decode {{replica}}"),),
            colours=look.ROLES,
            high=1.0,
        ),
        Panel(
            "Speculation: tokens per step",
            "That a sequence gets of a step: 1 without speculation.",
            (Query(_PER_ROW, "decode {{replica}}"),),
            colours=look.ROLES,
            low=1.0,
            decimals=2,
        ),
        Panel(
            "Speculation: drafts",
            "Tokens proposed per second, and those accepted.",
            (Query(rate(m.DRAFTED), "proposed"), Query(rate(m.ACCEPTED), "accepted")),
            colours=(("proposed", "light-orange"), ("accepted", look.DECODE)),
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.routers
# Are the routers well?

_EACH = "router {{replica}}"

ROUTERS = Row(
    "Are the routers well?",
    (
        Panel(
            "To choose workers",
            "Time of one decision. Above some milliseconds the router is short of CPU.",
            spread(m.DECISION),
            colours=look.QUANTILES,
        ),
        Panel(
            "TTFT, observed to predicted",
            "At 100% predictions are right. Far above, placements and refusals rest on wrong"
            " figures: workers are slower than they were when they were measured.",
            spread(m.PREDICTION),
            colours=look.QUANTILES,
        ),
        Panel(
            "Age of the prefix index",
            "Above some seconds: Redis does not answer, or the router does not keep up. It costs"
            " hits, and no request.",
            (Query(highest(m.INDEX_AGE, "replica"), _EACH),),
            colours=look.ROLES,
        ),
        Panel(
            "Blocks in the prefix index",
            "All routers should know about as many.",
            (Query(highest(m.INDEX_ENTRIES, "replica"), _EACH),),
            colours=look.ROLES,
        ),
        Panel(
            "CPU of routers",
            "A router is one process: near 100% of a core it is full, and another one helps.",
            (Query(rate(m.CPU, "replica", match=OF_ROUTERS), _EACH),),
            colours=look.ROLES,
            limits=((0.8, look.BAD),),
        ),
        Panel(
            "Memory of routers",
            "Most of it is the prefix index, and the tokenizer.",
            (Query(highest(m.MEMORY, "replica", match=OF_ROUTERS), _EACH),),
            colours=look.ROLES,
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.processes
# What do the workers' processes use?

PROCESSES = Row(
    "What do the workers' processes use?",
    (
        Panel(
            "CPU of engines",
            "In cores. On a GPU: one core, while it works.",
            (Query(rate(m.ENGINE_CPU, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "CPU of fronts",
            "In cores. A front is one process: near 100% it is full.",
            (Query(rate(m.CPU, "role", "replica", match=WORKERS), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Memory",
            "Front and engine; of an engine on a CPU the weights and the KV pool are most of it.",
            (
                Query(highest(m.ENGINE_MEMORY, "role", "replica"), f"{EACH_WORKER} engine"),
                Query(highest(m.MEMORY, "role", "replica", match=WORKERS), f"{EACH_WORKER} front"),
            ),
            colours=look.ROLES,
        ),
    ),
)
