"""What does the autoscaler want, and what is there?

Where several autoscalers run, one acts; what they tell is taken once.
"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import look
from cluster.dashboards.panels.promql import Expr, grown, highest, mean, rate, total
from cluster.dashboards.panels.spec import Panel, Query, Row, number

_LAST = highest(m.REASON, "reason")
_HELD = rate(m.WORKER_SECONDS, "role").within("short")

WELL = Row(
    "Does the autoscaler know what it does?",
    (
        number(
            "Age of what it knows",
            "Of the metrics that the last decision was made of. It changes nothing when they are"
            " three of its intervals old.",
            highest(m.READING_AGE),
            limits=look.OLD,
            idle="none runs",
            decimals=1,
        ),
        number(
            "Workers wanted",
            "Within the limits and the budget.",
            highest(m.DESIRED, "role"),
            "{{role}}",
            calm="blue",
        ),
        number(
            "Workers there",
            "By the role that they serve now, lent ones as well.",
            highest(m.THERE, "role"),
            "{{role}}",
            calm=look.BAD,
            limits=look.AT_LEAST_ONE,
        ),
        number(
            "Out of reach",
            "Objectives that no number of workers meets: a single request on an idle worker misses"
            " them. docs/operations.md says what helps.",
            total(m.INFEASIBLE),
            limits=look.ANY,
        ),
        number(
            "Last reason",
            "Of the last decision, the strongest that applied.",
            Expr(f"{_LAST.text} == 1", _LAST.unit, _LAST.uses),
            "{{reason}}",
            calm="blue",
        ),
        number(
            "Failures, last hour",
            "Parts of turns that failed: a loan, a number that could not be set, the log. The next"
            " turn decides anew.",
            grown(m.TURNS_FAILED, window="1h"),
            limits=((0.5, look.FAIR),),
            decimals=0,
        ),
    ),
)


def _sizes(role: str, about: str) -> Panel:
    return Panel(
        f"{role.capitalize()}: wanted and there",
        f"{about} needed over wanted: a limit or the budget holds.",
        tuple(
            Query(highest(metric, match=f'role="{role}"'), legend)
            for metric, legend in (
                (m.DESIRED, "wanted"),
                (m.THERE, "there"),
                (m.STARTING, "starting"),
                (m.NEEDED, "needed, before limits"),
            )
        ),
        width=12,
        colours=look.REPLICAS,
        decimals=0,
    )


SIZES = Row(
    "How many workers?",
    (
        _sizes("prefill", "There below wanted: it starts, or is lent."),
        _sizes("decode", "There above wanted: it waits before it takes away, and drains."),
        Panel(
            "Workers held",
            "From the asking for them until they are gone, by the role that they serve: what the"
            " cluster costs.",
            (Query(_HELD, "{{role}}"),),
            "stack",
            colours=look.ROLES,
        ),
        Panel(
            "Loans",
            "Workers that took the other role. Many both ways: the mix swings more quickly than"
            " the window of the autoscaler.",
            (Query(grown(m.FLIPS, "from", "to"), "{{from}} to {{to}}"),),
            "bars",
            colours=look.ROLES,
            decimals=0,
        ),
        Panel(
            "Load",
            "Busy prefill workers (erlangs), and sequences that decode at a time, that the window's"
            " requests come to.",
            (Query(highest(m.POOL_LOAD, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
    ),
)


# MERGED cluster.monitoring.dashboards.rows.reasons
# Is the autoscaler right? What is asked, and what does it do about it?

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
