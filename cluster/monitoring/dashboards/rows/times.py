"""How long do clients wait, and for what?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import heat, mean, rate
from cluster.monitoring.dashboards.rows.parts import spread
from cluster.monitoring.dashboards.spec import Panel, Query, Row

STAGES = ("route", "queue", "prefill", "first_emit")
"""Those that the time to first token is the sum of, in their order."""

_RARE = r"0\\.001|0\\.0025|40\\.0|80\\.0|160\\.0|640\\.0|2560\\.0"
"""Edges of buckets that a heat map does without: what lies there goes to the next one."""

TIMES = Row(
    "How long do clients wait, and for what?",
    (
        Panel(
            "Time to first token (TTFT)",
            "Over the line: the stages below tell where the time goes.",
            spread(m.TTFT, "ttft"),
            width=12,
            colours=look.QUANTILES,
        ),
        Panel(
            "Time per output token (TPOT)",
            "Over the line: decode workers have too many sequences, or compute prompts between"
            " their steps.",
            spread(m.TPOT, "tpot"),
            width=12,
            colours=look.QUANTILES,
        ),
        Panel(
            "TTFT, stage by stage",
            "Means. queue grows: too few prefill workers; prefill: longer prompts, or fewer of"
            " them cached; first_emit: the way back, through the decode worker; route: the router.",
            tuple(Query(mean(m.STAGE, match=f'stage="{name}"'), name) for name in STAGES),
            "stack",
            width=12,
            colours=look.STAGES,
        ),
        Panel(
            "TTFT, all requests",
            "How many first tokens came after how long. Two bands: two kinds of requests, as of"
            " cached and of new prompts. A band that climbs: a queue.",
            (Query(heat(m.TTFT, f'le!~"{_RARE}"'), "{{le}}"),),
            "heatmap",
            width=12,
        ),
        Panel(
            "Between two tokens (ITL)",
            "A p99 far above p50: streams stutter, for prompts between the steps, preemptions, or"
            " hand-overs to another worker.",
            spread(m.ITL),
            colours=look.QUANTILES,
        ),
        Panel(
            "Whole requests",
            "Of all requests, however they ended.",
            spread(m.DURATION),
            colours=look.QUANTILES,
        ),
        Panel(
            "In time, by objective",
            "Share of the requests that met each objective; all: both.",
            (Query(rate(m.SLO_MET, "slo").over(rate(m.SLO_OF, "slo")), "{{slo}}"),),
            colours=look.SLOS,
            low=None,
            high=1.0,
        ),
    ),
)
