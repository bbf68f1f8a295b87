"""Which wall binds?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import average, rate
from cluster.monitoring.dashboards.spec import Panel, Query, Row


def _walls(role: str, about: str) -> Panel:
    return Panel(
        f"Walls of the {role} pool",
        f"How much of each ceiling is used, on average over workers. {about}",
        (Query(average(m.WALL_USE, "wall", match=f'role="{role}"'), "{{wall}}"),),
        colours=look.WALLS,
        high=1.0,
    )


WALLS = Row(
    "Which wall binds?",
    (
        _walls("prefill", "It should be compute: many tokens share each read of the weights."),
        _walls("decode", "It should be bandwidth, or capacity: few tokens share each read."),
        Panel(
            "Busy",
            "Share of the time in which steps ran, on average over workers. Below a half nothing"
            " binds: the pool is larger than its load.",
            (Query(average(m.BUSY, "role"), "{{role}}"),),
            colours=look.ROLES,
            high=1.0,
        ),
        Panel(
            "Floating point operations",
            "Of all workers of a pool together.",
            (Query(rate(m.FLOPS, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
        Panel(
            "Memory moved by prefill",
            "By steps of all prefill workers together: weights once a step, and KV.",
            (Query(rate(m.MOVED, "kind", match='role="prefill"'), "{{kind}}"),),
            "stack",
            colours=look.MOVED,
        ),
        Panel(
            "Memory moved by decode",
            "By steps of all decode workers together. The more of it is KV, the more fp8 KV helps;"
            " the more is weights, the more sequences fit into a step nearly for free.",
            (Query(rate(m.MOVED, "kind", match='role="decode"'), "{{kind}}"),),
            "stack",
            colours=look.MOVED,
        ),
    ),
)
