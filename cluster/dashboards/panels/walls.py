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
        f"Share of each ceiling that its workers use. {about}",
        (max_of(m.WALL_USE, "wall", match=f'role="{role}"'), "{{wall}}"),
        colours=palette.WALLS,
        high=1.0,
    )


WALLS = row(
    "Which wall binds?",
    states(
        "The wall that binds",
        "The resource that limits each pool. none: the pool is mostly idle, or limited by"
        " overhead. It should be compute for prefill, and bandwidth or capacity for decode.",
        (_binding(), "{{role}}"),
        width=16,
        height=5,
        states=palette.BINDING,
    ),
    stat(
        "What would relax it",
        "Expected tokens per second with the technique, over those now. `baton status` shows the"
        " possible cost of each.",
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
        "Share of the time in which steps ran, averaged over workers. Below a half, the pool is"
        " mostly idle.",
        (max_of(m.BUSY, "role"), "{{role}}"),
        high=1.0,
    ),
    graph(
        "Floating point operations",
        "Sum over all workers of a pool.",
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
        "By steps of all decode workers together. The larger the share of KV, the more fp8 KV"
        " helps; the larger the share of weights, the less additional sequences in a step cost.",
        (rate(m.MOVED, "kind", match='role="decode"'), "{{kind}}"),
        colours=palette.MOVED,
    ),
)
