"""Which wall binds?"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import look
from cluster.dashboards.panels.promql import Expr, highest, rate, total
from cluster.dashboards.panels.spec import Panel, Query, Row, number


def _binding() -> Expr:
    """Of each pool, the place in look.BINDING. Each router tells one wall; where two differ for a
    moment, the later one counts."""
    names = [name for name, _ in look.BINDING[1:]]
    each = (total(m.BINDING, "role", "replica", match=f'wall="{name}"').text for name in names)
    places = "\n+ ".join(f"{place} * {text}" for place, text in enumerate(each, 1))
    return Expr(f"max by (role) (\n{places}\n)", "short", (m.BINDING,))


_NOTHING = 'label_replace(vector(1), "technique", "nothing to relax", "", "")'
_GAINS = highest(m.GAIN, "role", "technique")


def _walls(role: str, about: str) -> Panel:
    return Panel(
        f"Walls of the {role} pool",
        f"How much of each ceiling its workers use. {about}",
        (Query(highest(m.WALL_USE, "wall", match=f'role="{role}"'), "{{wall}}"),),
        colours=look.WALLS,
        high=1.0,
    )


WALLS = Row(
    "Which wall binds?",
    (
        Panel(
            "The wall that binds",
            "What each pool has to have more of, or use less of, to do more. none: it has less to"
            " do than it can, or overhead binds it. It should be compute for prefill; bandwidth,"
            " or capacity, for decode.",
            (Query(_binding(), "{{role}}"),),
            "states",
            width=16,
            height=5,
            states=look.BINDING,
        ),
        number(
            "What would relax it",
            "Tokens per second with the technique, over those now. docs/operations.md has the trap"
            " of each; `baton status` tells it, too.",
            Expr(f"{_GAINS.text}\nor on ()\n{_NOTHING}", "suffix:x", _GAINS.uses),
            "{{role}} {{technique}}",
            width=8,
            height=5,
            calm="blue",
            decimals=2,
        ),
        _walls("prefill", "Many tokens share each read of the weights: compute comes first."),
        _walls("decode", "Few tokens share each read of the weights: bandwidth comes first."),
        Panel(
            "Busy",
            "Share of the time in which steps ran, on average over workers. Below a half the pool"
            " has less to do than it can.",
            (Query(highest(m.BUSY, "role"), "{{role}}"),),
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
