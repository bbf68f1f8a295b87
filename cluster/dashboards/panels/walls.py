"""Which wall binds?"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import palette
from cluster.dashboards.panels.promql import Expr, max_of, rate, sum_of
from cluster.dashboards.panels.spec import Panel, graph, row, stack, stat, states


def _binding() -> Expr:
    """Return each pool's index into palette.BINDING.

    Each router exports one wall; while two routers differ, the higher index counts."""
    names = [name for name, _ in palette.BINDING[1:]]
    each = (sum_of(m.BINDING, "role", "replica", match=f'wall="{name}"').text for name in names)
    places = "\n+ ".join(f"{place} * {text}" for place, text in enumerate(each, 1))
    return Expr(f"max by (role) (\n{places}\n)", "short", (m.BINDING,))


_NOTHING = 'label_replace(vector(1), "technique", "nothing to relax", "", "")'
_GAINS = max_of(m.GAIN, "role", "technique")


def _walls(role: str, about: str) -> Panel:
    return graph(
        f"Walls of the {role} pool",
        f"How much of each ceiling its workers use. {about}",
        (max_of(m.WALL_USE, "wall", match=f'role="{role}"'), "{{wall}}"),
        colours=palette.WALLS,
        high=1.0,
    )


WALLS = row(
    "Which wall binds?",
    states(
        "The wall that binds",
        "What each pool has to have more of, or use less of, to do more. none: it has less to do"
        " than it can, or overhead binds it. It should be compute for prefill; bandwidth, or"
        " capacity, for decode.",
        (_binding(), "{{role}}"),
        width=16,
        height=5,
        states=palette.BINDING,
    ),
    stat(
        "What would relax it",
        "Tokens per second with the technique, over those now. docs/operations.md has the trap of"
        " each; `baton status` tells it, too.",
        _GAINS.wrapped(after=f"\nor on ()\n{_NOTHING}").with_unit("suffix:x"),
        "{{role}} {{technique}}",
        width=8,
        height=5,
        calm="blue",
        decimals=2,
    ),
    _walls("prefill", "Many tokens share each read of the weights: compute comes first."),
    _walls("decode", "Few tokens share each read of the weights: bandwidth comes first."),
    graph(
        "Busy",
        "Share of the time in which steps ran, on average over workers. Below a half the pool has"
        " less to do than it can.",
        (max_of(m.BUSY, "role"), "{{role}}"),
        high=1.0,
    ),
    graph(
        "Floating point operations",
        "Of all workers of a pool together.",
        (rate(m.FLOPS, "role"), "{{role}}"),
    ),
    stack(
        "Memory moved by prefill",
        "By steps of all prefill workers together: weights once a step, and KV.",
        (rate(m.MOVED, "kind", match='role="prefill"'), "{{kind}}"),
        colours=palette.MOVED,
    ),
    stack(
        "Memory moved by decode",
        "By steps of all decode workers together. The more of it is KV, the more fp8 KV helps; the"
        " more is weights, the more sequences fit into a step nearly for free.",
        (rate(m.MOVED, "kind", match='role="decode"'), "{{kind}}"),
        colours=palette.MOVED,
    ),
)
