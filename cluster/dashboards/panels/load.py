"""What do the pools have to do, and what do they do?"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import palette
from cluster.dashboards.panels.promql import (
    Expr,
    bucket_increase,
    increase,
    max_of,
    mean,
    rate,
    sum_of,
)
from cluster.dashboards.panels.spec import (
    EACH_WORKER,
    ROUTERS,
    WORKERS,
    graph,
    heatmap,
    quantile_queries,
    row,
    stack,
    stat,
)

_CACHED = Expr(
    f"{rate(m.PROMPT).text}\n-\n{rate(m.UNCACHED).text}",
    rate(m.PROMPT).unit,
    (m.PROMPT, m.UNCACHED),
)

LOAD = row(
    "What do the pools have to do, and what do they do?",
    stack(
        "Mix",
        "What requests are made of: prompt tokens from caches cost nearly nothing, those to"
        " compute load the prefill pool, output tokens the decode pool. When the mix moves, so"
        " should the pools' sizes.",
        (_CACHED, "from caches"),
        (rate(m.UNCACHED), "computed"),
        (rate(m.OUTPUT), "output"),
        colours=palette.MIX,
    ),
    graph(
        "Queued prompt tokens",
        "Still to be computed, by worker. One high and others low: requests stay where their"
        " prefix is cached; all high: the prefill pool is too small.",
        (sum_of(m.QUEUED, "role", "replica", match=WORKERS), EACH_WORKER),
    ),
    graph(
        "Workers by state",
        "As the routers know them.",
        (max_of(m.REPLICAS, "role", "state"), "{{role}} {{state}}"),
        colours=(*palette.ROLES, *palette.STATES),
        decimals=0,
    ),
    graph(
        "Prompt tokens computed",
        "Decode workers compute some, too: short prompts, and what no prefill worker can.",
        (rate(m.COMPUTED, "role", "replica"), EACH_WORKER),
    ),
    graph(
        "Tokens generated",
        "A prefill worker generates the first token of each request.",
        (rate(m.GENERATED, "role", "replica"), EACH_WORKER),
    ),
    graph(
        "Sequences",
        "That decode, and that wait: for prefill, for their KV, or for pages.",
        (sum_of(m.RUNNING, "role", match=WORKERS), "{{role}} running"),
        (sum_of(m.WAITING, "role", match=WORKERS), "{{role}} waiting"),
    ),
)


POOLS = row(
    "Which pool is short, and of what?",
    stat(
        "Prefill workers",
        "Those that are ready, as the routers know them.",
        max_of(m.REPLICAS, match='role="prefill", state="ready"'),
        calm=palette.FAIR,
        limits=palette.AT_LEAST_ONE,
    ),
    stat(
        "Decode workers",
        "Those that are ready, as the routers know them. Without one nothing is served.",
        max_of(m.REPLICAS, match='role="decode", state="ready"'),
        calm=palette.BAD,
        limits=palette.AT_LEAST_ONE,
    ),
    stat(
        "Prompt tokens queued",
        "Still to be computed, by all workers together. What stays here keeps first tokens"
        " waiting: another prefill worker helps.",
        sum_of(m.QUEUED, match=WORKERS),
        calm="blue",
    ),
    stat(
        "Fullest KV pool, prefill",
        "Of all prefill workers.",
        max_of(m.KV_USAGE, match='role="prefill"'),
        limits=palette.FULL,
    ),
    stat(
        "Fullest KV pool, decode",
        "Of all decode workers. Full pools keep sequences waiting, or preempt them.",
        max_of(m.KV_USAGE, match='role="decode"'),
        limits=palette.FULL,
    ),
    stat(
        "Engine deaths, last hour",
        "Engines that died or hung, and were replaced.",
        increase(m.RESTARTS, window="1h"),
        limits=((0.5, palette.FAIR), (2.5, palette.BAD)),
        decimals=0,
    ),
)


REQUESTS = row(
    "What is asked, and what becomes of it?",
    stack(
        "Requests, by how they end",
        "ok, cancelled by the client, or the HTTP status of the error.",
        (rate(m.REQUESTS, "status"), "{{status}}"),
        colours=palette.STATUSES,
    ),
    stack(
        "Refusals, by reason",
        "requests: too many of one priority at once; ttft: the first token was predicted to come"
        " after the deadline; queue: the queue was predicted to take too long.",
        (rate(m.REFUSALS, "reason"), "{{reason}}"),
        colours=(),
    ),
    stack(
        "Requests inside",
        "If those before their first token grow, and do not fall again, there is more to do than"
        " the workers can.",
        (sum_of(m.ASKED, match=ROUTERS), "before their first token"),
        (sum_of(m.ANSWERED, match=ROUTERS), "getting tokens"),
        colours=(("before their first token", palette.FAIR), ("getting tokens", palette.GOOD)),
    ),
    graph(
        "Tokens to clients",
        "By all routers together.",
        (rate(m.OUTPUT), "output"),
        colours=palette.MIX,
    ),
    graph(
        "Prompts",
        "Of requests that were answered: all of their prompts' tokens, and those that had to be"
        " computed.",
        (rate(m.PROMPT), "all"),
        (rate(m.UNCACHED), "computed"),
        colours=(("all", "light-blue"), *palette.MIX),
    ),
    graph(
        "Requests of the hour before",
        "What a rate is too small to show: single errors.",
        (increase(m.REQUESTS, "status", window="1h"), "{{status}}"),
        colours=palette.STATUSES,
        decimals=0,
    ),
)


STAGES = ("route", "queue", "prefill", "first_emit")
"""Those that the time to first token is the sum of, in their order."""

_RARE = r"0\\.001|0\\.0025|40\\.0|80\\.0|160\\.0|640\\.0|2560\\.0"
"""Edges of buckets that a heat map does without: what lies there goes to the next one."""

TIMES = row(
    "How long do clients wait, and for what?",
    graph(
        "Time to first token (TTFT)",
        "Over the line: the stages below tell where the time goes.",
        *quantile_queries(m.TTFT, "ttft"),
        width=12,
        colours=palette.QUANTILES,
    ),
    graph(
        "Time per output token (TPOT)",
        "Over the line: decode workers have too many sequences, or compute prompts between their"
        " steps.",
        *quantile_queries(m.TPOT, "tpot"),
        width=12,
        colours=palette.QUANTILES,
    ),
    stack(
        "TTFT, stage by stage",
        "Means. queue grows: too few prefill workers; prefill: longer prompts, or fewer of them"
        " cached; first_emit: the way back, through the decode worker; route: the router.",
        *((mean(m.STAGE, match=f'stage="{name}"'), name) for name in STAGES),
        width=12,
        colours=palette.STAGES,
    ),
    heatmap(
        "TTFT, all requests",
        "How many first tokens came after how long. Two bands: two kinds of requests, as of cached"
        " and of new prompts. A band that climbs: a queue.",
        (bucket_increase(m.TTFT, f'le!~"{_RARE}"'), "{{le}}"),
        width=12,
    ),
    graph(
        "Between two tokens (ITL)",
        "A p99 far above p50: streams stutter, for prompts between the steps, preemptions, or"
        " hand-overs to another worker.",
        *quantile_queries(m.ITL),
        colours=palette.QUANTILES,
    ),
    graph(
        "Whole requests",
        "Of all requests, however they ended.",
        *quantile_queries(m.DURATION),
        colours=palette.QUANTILES,
    ),
    graph(
        "In time, by objective",
        "Share of the requests that met each objective; all: both.",
        (rate(m.SLO_MET, "slo").over(rate(m.SLO_OF, "slo")), "{{slo}}"),
        colours=palette.SLOS,
        low=None,
        high=1.0,
    ),
)
