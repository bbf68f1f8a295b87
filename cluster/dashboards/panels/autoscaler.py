"""What does the autoscaler want, and what is there?

Where several autoscalers run, one acts; what they tell is taken once.
"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import palette
from cluster.dashboards.panels.promql import Expr, increase, max_of, mean, rate, sum_of
from cluster.dashboards.panels.spec import Panel, bars, graph, row, stack, stat, states

_LAST = max_of(m.REASON, "reason")
_HELD = rate(m.WORKER_SECONDS, "role").with_unit("short")

WELL = row(
    "Does the autoscaler know what it does?",
    stat(
        "Age of what it knows",
        "Of the metrics that the last decision was made of. It changes nothing when they are three"
        " of its intervals old.",
        max_of(m.READING_AGE),
        limits=palette.OLD,
        idle="none runs",
        decimals=1,
    ),
    stat(
        "Workers wanted",
        "Within the limits and the budget.",
        max_of(m.DESIRED, "role"),
        "{{role}}",
        calm="blue",
    ),
    stat(
        "Workers there",
        "By the role that they serve now, lent ones as well.",
        max_of(m.THERE, "role"),
        "{{role}}",
        calm=palette.BAD,
        limits=palette.AT_LEAST_ONE,
    ),
    stat(
        "Out of reach",
        "Objectives that no number of workers meets: a single request on an idle worker misses"
        " them. docs/operations.md says what helps.",
        sum_of(m.INFEASIBLE),
        limits=palette.ANY,
    ),
    stat(
        "Last reason",
        "Of the last decision, the strongest that applied.",
        _LAST.wrapped(after=" == 1"),
        "{{reason}}",
        calm="blue",
    ),
    stat(
        "Failures, last hour",
        "Parts of turns that failed: a loan, a number that could not be set, the log. The next"
        " turn decides anew.",
        increase(m.TURNS_FAILED, window="1h"),
        limits=((0.5, palette.FAIR),),
        decimals=0,
    ),
)


def _sizes(role: str, about: str) -> Panel:
    return graph(
        f"{role.capitalize()}: wanted and there",
        f"{about} needed over wanted: a limit or the budget holds.",
        *(
            (max_of(metric, match=f'role="{role}"'), legend)
            for metric, legend in (
                (m.DESIRED, "wanted"),
                (m.THERE, "there"),
                (m.STARTING, "starting"),
                (m.NEEDED, "needed, before limits"),
            )
        ),
        width=12,
        colours=palette.REPLICAS,
        decimals=0,
    )


SIZES = row(
    "How many workers?",
    _sizes("prefill", "There below wanted: it starts, or is lent."),
    _sizes("decode", "There above wanted: it waits before it takes away, and drains."),
    stack(
        "Workers held",
        "From the asking for them until they are gone, by the role that they serve: what the"
        " cluster costs.",
        (_HELD, "{{role}}"),
    ),
    bars(
        "Loans",
        "Workers that took the other role. Many both ways: the mix swings more quickly than the"
        " window of the autoscaler.",
        (increase(m.FLIPS, "from", "to"), "{{from}} to {{to}}"),
        decimals=0,
    ),
    graph(
        "Load",
        "Busy prefill workers (erlangs), and sequences that decode at a time, that the window's"
        " requests come to.",
        (max_of(m.POOL_LOAD, "role"), "{{role}}"),
    ),
)


_MODES = [sum_of(m.MODE, "replica", match=f'mode="{mode}"').text for mode in ("advise", "act")]
_MODE = Expr(f"{_MODES[0]}\n+ 2 * {_MODES[1]}", "short", (m.MODE,))


def _prediction(slo: str, predicted: m.Metric, observed: m.Metric, about: str) -> Panel:
    return graph(
        f"{slo.upper()}, predicted and observed",
        f"Means. {about}",
        (max_of(predicted), "predicted"),
        (max_of(observed), "observed"),
        (max_of(m.OBJECTIVE, match=f'slo="{slo}"'), "objective"),
        width=12,
        colours=palette.PREDICTION,
    )


TRUTH = row(
    "Is it right?",
    _prediction(
        *("ttft", m.PREDICTED_TTFT, m.OBSERVED_TTFT),
        "No prediction: the load is more than the prefill workers can take.",
    ),
    _prediction(
        *("tpot", m.PREDICTED_TPOT, m.OBSERVED_TPOT),
        "No prediction: the load is more than the decode workers can take.",
    ),
    graph(
        "Correction",
        "Observed to predicted of the same requests, by which needs are corrected. It stays between"
        " a half and two; at an end the model of the workers' steps is wrong, or they lack CPU.",
        (max_of(m.CORRECTION, "role"), "{{role}}"),
        width=12,
    ),
    graph(
        "Error of the forecast",
        "Of the forecast of the minute before: requests (rate), and workers of each role. Above 0:"
        " more came than was forecast.",
        (max_of(m.FORECAST_ERROR, "figure"), "{{figure}}"),
        width=12,
    ),
)

DEMAND = row(
    "What is asked?",
    graph(
        "Requests that arrive",
        "Refused and queued ones as well.",
        (rate(m.RECEIVED), "arrive"),
        width=12,
        colours=(),
    ),
    graph(
        "What requests are made of",
        "Means. Prompts weigh on prefill, outputs on decode: workers follow these lines.",
        (mean(m.PROMPT_LENGTH), "prompt"),
        (mean(m.UNCACHED_LENGTH), "computed"),
        (mean(m.OUTPUT_LENGTH), "output"),
        width=12,
        colours=(("prompt", "light-blue"), *palette.MIX),
    ),
)

REASONS = row(
    "What does it do, and why?",
    bars(
        "Decisions, by reason",
        "demand: more is needed; surplus: less has done for long enough; settling: not yet; loan:"
        " one pool lends to the other; limit: more is needed than may be; no_metrics: nothing is"
        " known, so nothing changes.",
        (increase(m.DECISIONS, "reason"), "{{reason}}"),
        width=12,
        colours=(),
    ),
    bars(
        "Parts of turns that failed",
        "loan: a worker did not take the role; replicas: Ray Serve did not take the number, or did"
        " not say it; lease, log: Redis, or the disk.",
        (increase(m.TURNS_FAILED, "what"), "{{what}}"),
        width=12,
        decimals=0,
        colours=(),
    ),
    states(
        "Objectives",
        "Out of reach: a single request on an idle worker misses it.",
        (max_of(m.INFEASIBLE, "slo"), "{{slo}}"),
        width=12,
        height=5,
        states=palette.REACH,
    ),
    states(
        "What it does",
        "Where several run, one acts, and the others watch.",
        (_MODE, "autoscaler {{replica}}"),
        width=12,
        height=5,
        states=palette.MODES,
    ),
)
