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
    "Are the autoscaler's data current?",
    stat(
        "Age of its data",
        "Age of the metrics behind the last decision. When they are older than three intervals,"
        " nothing is changed.",
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
        "Infeasible objectives",
        "Objectives that no number of workers meets: a single request on an idle worker misses"
        " them. docs/operations.md has remedies.",
        sum_of(m.INFEASIBLE),
        limits=palette.ANY,
    ),
    stat(
        "Last reason",
        "The main reason of the last decision.",
        _LAST.wrapped(after=" == 1"),
        "{{reason}}",
        calm="blue",
    ),
    stat(
        "Failures, last hour",
        "Parts of turns that failed: a loan, a number that could not be set, the log. The next"
        " turn decides again.",
        increase(m.TURNS_FAILED, window="1h"),
        limits=((0.5, palette.FAIR),),
        decimals=0,
    ),
)


def _sizes(role: str, about: str) -> Panel:
    return graph(
        f"{role.capitalize()}: wanted and present",
        f"{about} If needed is above wanted, a limit or the budget applies.",
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
    _sizes("prefill", "If fewer are present than wanted, workers are starting or being lent."),
    _sizes(
        "decode",
        "If more are present than wanted, the autoscaler waits before it removes"
        " workers, and they drain.",
    ),
    stack(
        "Workers held",
        "From the request for a worker until it is gone, by the role that it serves: what the"
        " cluster costs.",
        (_HELD, "{{role}}"),
    ),
    bars(
        "Loans",
        "Workers that took the other role. Many in both directions: the load changes faster than"
        " the autoscaler's window.",
        (increase(m.FLIPS, "from", "to"), "{{from}} to {{to}}"),
        decimals=0,
    ),
    graph(
        "Load",
        "The load of the window's requests: busy prefill workers (erlangs), and sequences that"
        " decode at the same time.",
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
    "Are the predictions right?",
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
        "Observed over predicted of the same requests; needs are multiplied by it. It is bounded"
        " by a half and two; at a bound the model of the workers' steps is wrong, or they lack"
        " CPU.",
        (max_of(m.CORRECTION, "role"), "{{role}}"),
        (max_of(m.KV_CORRECTION), "KV of a sequence"),
        width=12,
    ),
    graph(
        "Error of the forecast",
        "Error of the forecast made a minute before: requests (rate), and workers of each role."
        " Above 0: more than was forecast.",
        (max_of(m.FORECAST_ERROR, "figure"), "{{figure}}"),
        width=12,
    ),
)

DEMAND = row(
    "What is the load?",
    graph(
        "Requests that arrive",
        "Including refused and queued ones.",
        (rate(m.RECEIVED), "arrive"),
        width=12,
        colours=(),
    ),
    graph(
        "Lengths of requests",
        "Means. Prompts load the prefill pool, outputs the decode pool, so the numbers of workers"
        " follow these lines.",
        (mean(m.PROMPT_LENGTH), "prompt"),
        (mean(m.UNCACHED_LENGTH), "computed"),
        (mean(m.OUTPUT_LENGTH), "output"),
        width=12,
        colours=(("prompt", "light-blue"), *palette.MIX),
    ),
)

REASONS = row(
    "What does the autoscaler do, and why?",
    bars(
        "Decisions, by reason",
        "demand: more workers are needed; surplus: fewer have been enough for long enough;"
        " settling: not for long enough yet; loan: one pool lends to the other; limit: more are"
        " needed than the limits allow; no_metrics: no data, so nothing changes.",
        (increase(m.DECISIONS, "reason"), "{{reason}}"),
        width=12,
        colours=(),
    ),
    bars(
        "Parts of turns that failed",
        "loan: a worker did not take the role; replicas: Ray Serve did not accept the number, or"
        " did not report it; lease, log: Redis or the disk failed.",
        (increase(m.TURNS_FAILED, "what"), "{{what}}"),
        width=12,
        decimals=0,
        colours=(),
    ),
    states(
        "Objectives",
        "Infeasible: a single request on an idle worker misses it.",
        (max_of(m.INFEASIBLE, "slo"), "{{slo}}"),
        width=12,
        height=5,
        states=palette.REACH,
    ),
    states(
        "Mode",
        "If several run, one acts and the others watch.",
        (_MODE, "autoscaler {{replica}}"),
        width=12,
        height=5,
        states=palette.MODES,
    ),
)
