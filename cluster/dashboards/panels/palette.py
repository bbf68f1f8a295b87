"""Colours and thresholds that panels share. Colour names are Grafana's."""

from __future__ import annotations

from typing import TypeAlias

Colours: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs (legend, colour); the last that matches counts. A legend with a dot is a regular
expression, and its series get shades of the colour."""
Limits: TypeAlias = tuple[tuple[float, str], ...]
"""Thresholds (value from which the colour counts, colour), ascending."""

PREFILL, DECODE, ROUTER = "blue", "orange", "purple"
GOOD, FAIR, BAD = "green", "yellow", "red"

ROLES: Colours = (
    *(("prefill.+", PREFILL), ("decode.+", DECODE), ("router.+", ROUTER)),
    *(("prefill", PREFILL), ("decode", DECODE)),
)
QUANTILES: Colours = (
    *(("p50", "light-blue"), ("p90", "blue"), ("p99", "purple")),
    ("objective", BAD),
)
STATUSES: Colours = (
    *(("ok", GOOD), ("cancelled", "text")),
    *(("4..", FAIR), ("429", "orange"), ("5..", BAD)),
)
STAGES: Colours = (
    *(("route", ROUTER), ("queue", FAIR), ("prefill", PREFILL), ("first_emit", DECODE)),
    *(("wire", "dark-green"), ("scatter", "light-green")),
)
STATES: Colours = ((".+ draining", FAIR), (".+ down", BAD))
MIX: Colours = (("from caches", "light-blue"), ("computed", PREFILL), ("output", DECODE))
WALLS: Colours = (
    *(("compute", "red"), ("bandwidth", "yellow"), ("capacity", "purple"), ("network", "green")),
)
BINDING: Colours = (("none", "text"), *WALLS)
MOVED: Colours = (("weights", "text"), ("kv", "purple"))
REPLICAS: Colours = (
    *(("wanted", PREFILL), ("there", GOOD), ("starting", FAIR)),
    ("needed, before limits", "text"),
)
PREDICTION: Colours = (("predicted", "light-blue"), ("observed", DECODE), ("objective", BAD))
SLOS: Colours = (("ttft", PREFILL), ("tpot", DECODE), ("all", GOOD))

# Meanings of the values 0, 1, ... of a panel of states.
REACH: Colours = (("within reach", GOOD), ("infeasible", BAD))
MODES: Colours = (("watches", "text"), ("advises", FAIR), ("acts", GOOD))

IN_TIME: Limits = ((0.95, FAIR), (0.99, GOOD))
OF_OBJECTIVE: Limits = ((0.8, FAIR), (1.0, BAD))
OLD: Limits = ((30.0, FAIR), (60.0, BAD))
FULL: Limits = ((0.8, FAIR), (0.9, BAD))
ANY: Limits = ((1e-9, FAIR),)
AT_LEAST_ONE: Limits = ((1.0, GOOD),)
