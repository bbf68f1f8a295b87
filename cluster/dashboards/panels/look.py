"""Colours, the same on all panels; limits that several share. Names are Grafana's."""

from __future__ import annotations

from cluster.dashboards.panels.spec import Colours

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
TOLD: Colours = (("predicted", "light-blue"), ("observed", DECODE), ("objective", BAD))
REACH = (("within reach", GOOD), ("out of reach", BAD))
MODES = (("watches", "text"), ("advises", FAIR), ("acts", GOOD))
SLOS: Colours = (("ttft", PREFILL), ("tpot", DECODE), ("all", GOOD))

IN_TIME = ((0.95, FAIR), (0.99, GOOD))
OF_OBJECTIVE = ((0.8, FAIR), (1.0, BAD))
OLD = ((30.0, FAIR), (60.0, BAD))
FULL = ((0.8, FAIR), (0.9, BAD))
ANY = ((1e-9, FAIR),)
AT_LEAST_ONE = ((1.0, GOOD),)
