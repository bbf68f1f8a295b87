"""What is the pools' load, and what do they do?"""

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
    "What is the pools' load, and what do they do?",
    stack(
        "Mix",
        "Prompt tokens from caches cost nearly nothing, prompt tokens to compute load the prefill"
        " pool, and output tokens load the decode pool. If the mix changes, so should the pools'"
        " sizes.",
        (_CACHED, "from caches"),
        (rate(m.UNCACHED), "computed"),
        (rate(m.OUTPUT), "output"),
        colours=palette.MIX,
    ),
    graph(
        "Queued prompt tokens",
        "Prompt tokens yet to be computed, by worker. One high and others low: requests stay"
        " where their prefix is cached. All high: the prefill pool is too small.",
        (sum_of(m.QUEUED, "role", "replica", match=WORKERS), EACH_WORKER),
    ),
    graph(
        "Workers by state",
        "As the routers see them.",
        (max_of(m.REPLICAS, "role", "state"), "{{role}} {{state}}"),
        colours=(*palette.ROLES, *palette.STATES),
        decimals=0,
    ),
    graph(
        "Prompt tokens computed",
        "Decode workers compute some, too: short prompts, and those for which no prefill worker"
        " is available.",
        (rate(m.COMPUTED, "role", "replica"), EACH_WORKER),
    ),
    graph(
        "Tokens generated",
        "A prefill worker generates the first token of each request.",
        (rate(m.GENERATED, "role", "replica"), EACH_WORKER),
    ),
    graph(
        "Sequences",
        "Sequences that decode, and those that wait for prefill, KV or pages.",
        (sum_of(m.RUNNING, "role", match=WORKERS), "{{role}} running"),
        (sum_of(m.WAITING, "role", match=WORKERS), "{{role}} waiting"),
    ),
)


POOLS = row(
    "Which pool is short of workers?",
    stat(
        "Prefill workers",
        "Ready workers, as the routers see them.",
        max_of(m.REPLICAS, match='role="prefill", state="ready"'),
        calm=palette.FAIR,
        limits=palette.AT_LEAST_ONE,
    ),
    stat(
        "Decode workers",
        "Ready workers, as the routers see them. Without one no request is served.",
        max_of(m.REPLICAS, match='role="decode", state="ready"'),
        calm=palette.BAD,
        limits=palette.AT_LEAST_ONE,
    ),
    stat(
        "Prompt tokens queued",
        "Prompt tokens yet to be computed, over all workers. If this stays high, first tokens are"
        " late: another prefill worker helps.",
        sum_of(m.QUEUED, match=WORKERS),
        calm="blue",
    ),
    stat(
        "Fullest KV pool, prefill",
        "The fullest of all prefill workers.",
        max_of(m.KV_USAGE, match='role="prefill"'),
        limits=palette.FULL,
    ),
    stat(
        "Fullest KV pool, decode",
        "The fullest of all decode workers. With full pools, sequences wait or are preempted.",
        max_of(m.KV_USAGE, match='role="decode"'),
        limits=palette.FULL,
    ),
    stat(
        "Engine deaths, last hour",
        "Engines that died or hung and were replaced.",
        increase(m.RESTARTS, window="1h"),
        limits=((0.5, palette.FAIR), (2.5, palette.BAD)),
        decimals=0,
    ),
)


REQUESTS = row(
    "How do requests end?",
    stack(
        "Requests, by how they end",
        "ok, cancelled by the client, or the HTTP status of the error.",
        (rate(m.REQUESTS, "status"), "{{status}}"),
        colours=palette.STATUSES,
    ),
    stack(
        "Refusals, by reason",
        "requests: too many of one priority at once; ttft: the first token was predicted to miss"
        " the deadline; queue: the queue was predicted to take too long.",
        (rate(m.REFUSALS, "reason"), "{{reason}}"),
        colours=(),
    ),
    stack(
        "Requests inside",
        "If the number of requests before their first token grows and does not fall again, the"
        " load is more than the workers can serve.",
        (sum_of(m.ASKED, match=ROUTERS), "before their first token"),
        (sum_of(m.ANSWERED, match=ROUTERS), "getting tokens"),
        colours=(("before their first token", palette.FAIR), ("getting tokens", palette.GOOD)),
    ),
    graph(
        "Tokens to clients",
        "Over all routers.",
        (rate(m.OUTPUT), "output"),
        colours=palette.MIX,
    ),
    graph(
        "Prompts",
        "Of answered requests: all prompt tokens, and those that had to be computed.",
        (rate(m.PROMPT), "all"),
        (rate(m.UNCACHED), "computed"),
        colours=(("all", "light-blue"), *palette.MIX),
    ),
    graph(
        "Requests of the hour before",
        "Shows single errors, for which a rate is too small.",
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
        "Above the objective: the stages below show where the time goes.",
        *quantile_queries(m.TTFT, "ttft"),
        width=12,
        colours=palette.QUANTILES,
    ),
    graph(
        "Time per output token (TPOT)",
        "Above the objective: decode workers have too many sequences, or compute prompts between"
        " their steps.",
        *quantile_queries(m.TPOT, "tpot"),
        width=12,
        colours=palette.QUANTILES,
    ),
    stack(
        "TTFT, stage by stage",
        "Means. If queue grows, there are too few prefill workers; prefill: prompts are longer,"
        " or fewer of them cached; first_emit: the way back through the decode worker; route: the"
        " router.",
        *((mean(m.STAGE, match=f'stage="{name}"'), name) for name in STAGES),
        width=12,
        colours=palette.STAGES,
    ),
    heatmap(
        "TTFT, all requests",
        "Number of first tokens by their latency. Two bands mean two kinds of requests, such as"
        " cached and new prompts. A rising band means a queue.",
        (bucket_increase(m.TTFT, f'le!~"{_RARE}"'), "{{le}}"),
        width=12,
    ),
    graph(
        "Between two tokens (ITL)",
        "If p99 is far above p50, streams stutter because of prompts between the steps,"
        " preemptions, or hand-overs to another worker.",
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
