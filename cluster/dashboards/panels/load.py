"""What do the pools have to do, and what do they do?"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import look
from cluster.dashboards.panels.promql import Expr, grown, heat, highest, mean, rate, total
from cluster.dashboards.panels.spec import (
    EACH_WORKER,
    ROUTERS,
    WORKERS,
    Panel,
    Query,
    Row,
    number,
    spread,
)

_CACHED = Expr(
    f"{rate(m.PROMPT).text}\n-\n{rate(m.UNCACHED).text}",
    rate(m.PROMPT).unit,
    (m.PROMPT, m.UNCACHED),
)

LOAD = Row(
    "What do the pools have to do, and what do they do?",
    (
        Panel(
            "Mix",
            "What requests are made of: prompt tokens from caches cost nearly nothing, those to"
            " compute load the prefill pool, output tokens the decode pool. When the mix moves,"
            " so should the pools' sizes.",
            (
                Query(_CACHED, "from caches"),
                Query(rate(m.UNCACHED), "computed"),
                Query(rate(m.OUTPUT), "output"),
            ),
            "stack",
            colours=look.MIX,
        ),
        Panel(
            "Queued prompt tokens",
            "Still to be computed, by worker. One high and others low: requests stay where their"
            " prefix is cached; all high: the prefill pool is too small.",
            (Query(total(m.QUEUED, "role", "replica", match=WORKERS), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Workers by state",
            "As the routers know them.",
            (Query(highest(m.REPLICAS, "role", "state"), "{{role}} {{state}}"),),
            colours=(*look.ROLES, *look.STATES),
            decimals=0,
        ),
        Panel(
            "Prompt tokens computed",
            "Decode workers compute some, too: short prompts, and what no prefill worker can.",
            (Query(rate(m.COMPUTED, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Tokens generated",
            "A prefill worker generates the first token of each request.",
            (Query(rate(m.GENERATED, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Sequences",
            "That decode, and that wait: for prefill, for their KV, or for pages.",
            (
                Query(total(m.RUNNING, "role", match=WORKERS), "{{role}} running"),
                Query(total(m.WAITING, "role", match=WORKERS), "{{role}} waiting"),
            ),
            colours=look.ROLES,
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.pools
# Which pool is short, and of what?

POOLS = Row(
    "Which pool is short, and of what?",
    (
        number(
            "Prefill workers",
            "Those that are ready, as the routers know them.",
            highest(m.REPLICAS, match='role="prefill", state="ready"'),
            calm=look.FAIR,
            limits=look.AT_LEAST_ONE,
        ),
        number(
            "Decode workers",
            "Those that are ready, as the routers know them. Without one nothing is served.",
            highest(m.REPLICAS, match='role="decode", state="ready"'),
            calm=look.BAD,
            limits=look.AT_LEAST_ONE,
        ),
        number(
            "Prompt tokens queued",
            "Still to be computed, by all workers together. What stays here keeps first tokens"
            " waiting: another prefill worker helps.",
            total(m.QUEUED, match=WORKERS),
            calm="blue",
        ),
        number(
            "Fullest KV pool, prefill",
            "Of all prefill workers.",
            highest(m.KV_USAGE, match='role="prefill"'),
            limits=look.FULL,
        ),
        number(
            "Fullest KV pool, decode",
            "Of all decode workers. Full pools keep sequences waiting, or preempt them.",
            highest(m.KV_USAGE, match='role="decode"'),
            limits=look.FULL,
        ),
        number(
            "Engine deaths, last hour",
            "Engines that died or hung, and were replaced.",
            grown(m.RESTARTS, window="1h"),
            limits=((0.5, look.FAIR), (2.5, look.BAD)),
            decimals=0,
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.requests
# What is asked, and what becomes of it?

REQUESTS = Row(
    "What is asked, and what becomes of it?",
    (
        Panel(
            "Requests, by how they end",
            "ok, cancelled by the client, or the HTTP status of the error.",
            (Query(rate(m.REQUESTS, "status"), "{{status}}"),),
            "stack",
            colours=look.STATUSES,
        ),
        Panel(
            "Refusals, by reason",
            "requests: too many of one priority at once; ttft: the first token was predicted to"
            " come after the deadline; queue: the queue was predicted to take too long.",
            (Query(rate(m.REFUSALS, "reason"), "{{reason}}"),),
            "stack",
        ),
        Panel(
            "Requests inside",
            "If those before their first token grow, and do not fall again, there is more to do"
            " than the workers can.",
            (
                Query(total(m.ASKED, match=ROUTERS), "before their first token"),
                Query(total(m.ANSWERED, match=ROUTERS), "getting tokens"),
            ),
            "stack",
            colours=(("before their first token", look.FAIR), ("getting tokens", look.GOOD)),
        ),
        Panel(
            "Tokens to clients",
            "By all routers together.",
            (Query(rate(m.OUTPUT), "output"),),
            colours=look.MIX,
        ),
        Panel(
            "Prompts",
            "Of requests that were answered: all of their prompts' tokens, and those that had to"
            " be computed.",
            (Query(rate(m.PROMPT), "all"), Query(rate(m.UNCACHED), "computed")),
            colours=(("all", "light-blue"), *look.MIX),
        ),
        Panel(
            "Requests of the hour before",
            "What a rate is too small to show: single errors.",
            (Query(grown(m.REQUESTS, "status", window="1h"), "{{status}}"),),
            colours=look.STATUSES,
            decimals=0,
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.times
# How long do clients wait, and for what?

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
