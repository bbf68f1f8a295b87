"""Is the autoscaler right? What is asked, and what does it do about it?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import Expr, grown, highest, mean, rate, total
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_MODES = [total(m.MODE, "replica", match=f'mode="{mode}"').text for mode in ("advise", "act")]
_MODE = Expr(f"{_MODES[0]}\n+ 2 * {_MODES[1]}", "short", (m.MODE,))


def _told(slo: str, predicted: m.Metric, observed: m.Metric, about: str) -> Panel:
    return Panel(
        f"{slo.upper()}, predicted and observed",
        f"Means. {about}",
        (
            Query(highest(predicted), "predicted"),
            Query(highest(observed), "observed"),
            Query(highest(m.OBJECTIVE, match=f'slo="{slo}"'), "objective"),
        ),
        colours=look.TOLD,
    )


TRUTH = Row(
    "Is it right?",
    (
        _told(
            *("ttft", m.PREDICTED_TTFT, m.OBSERVED_TTFT),
            "No prediction: the load is more than the prefill workers can take.",
        ),
        _told(
            *("tpot", m.PREDICTED_TPOT, m.OBSERVED_TPOT),
            "No prediction: the load is more than the decode workers can take.",
        ),
        Panel(
            "Correction",
            "Observed to predicted, by which needs are corrected. It stays between a half and two;"
            " at an end the model of the workers' steps is wrong, or they lack CPU.",
            (Query(highest(m.CORRECTION, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
    ),
)

DEMAND = Row(
    "What is asked?",
    (
        Panel(
            "Requests that arrive",
            "Refused and queued ones as well.",
            (Query(rate(m.RECEIVED), "arrive"),),
            width=12,
        ),
        Panel(
            "What requests are made of",
            "Means. Prompts weigh on prefill, outputs on decode: workers follow these lines.",
            (
                Query(mean(m.PROMPT_LENGTH), "prompt"),
                Query(mean(m.UNCACHED_LENGTH), "computed"),
                Query(mean(m.OUTPUT_LENGTH), "output"),
            ),
            width=12,
            colours=(("prompt", "light-blue"), *look.MIX),
        ),
    ),
)

REASONS = Row(
    "What does it do, and why?",
    (
        Panel(
            "Decisions, by reason",
            "demand: more is needed; surplus: less has done for long enough; settling: not yet;"
            " loan: one pool lends to the other; limit: more is needed than may be; no_metrics:"
            " nothing is known, so nothing changes.",
            (Query(grown(m.DECISIONS, "reason"), "{{reason}}"),),
            "bars",
            width=12,
        ),
        Panel(
            "Parts of turns that failed",
            "loan: a worker did not take the role; replicas: Ray Serve did not take the number, or"
            " did not say it; lease, log: Redis, or the disk.",
            (Query(grown(m.TURNS_FAILED, "what"), "{{what}}"),),
            "bars",
            width=12,
            decimals=0,
        ),
        Panel(
            "Objectives",
            "Out of reach: a single request on an idle worker misses it.",
            (Query(highest(m.INFEASIBLE, "slo"), "{{slo}}"),),
            "states",
            width=12,
            height=5,
            states=look.REACH,
        ),
        Panel(
            "What it does",
            "Where several run, one acts, and the others watch.",
            (Query(_MODE, "autoscaler {{replica}}"),),
            "states",
            width=12,
            height=5,
            states=look.MODES,
        ),
    ),
)
