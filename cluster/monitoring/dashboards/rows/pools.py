"""Which pool is short, and of what?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import grown, highest, total
from cluster.monitoring.dashboards.rows.parts import WORKERS, number
from cluster.monitoring.dashboards.spec import Row

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
