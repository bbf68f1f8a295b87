"""A decode worker's speculation on the screen."""

from __future__ import annotations

from rich.text import Text

from router.overview.speculation import SpeculationView


def line(worker: str, view: SpeculationView) -> Text:
    """``worker``: how the table above calls it."""
    start = Text.assemble(("drafts    ", "dim"), f"{worker} ")
    if view.state == "dropped":
        return start.append("dropped: the log says why", style="yellow")
    parts = [view.proposer]
    if view.tokens_per_step is not None:
        parts.append(f"{view.tokens_per_step:.2f} tokens a step")
    if view.acceptance is not None:
        drafted = f" of {view.tokens_per_draft:.1f}" if view.tokens_per_draft else ""
        parts.append(f"{view.acceptance:.0%}{drafted} accepted")
        parts.append(f"speed-up {view.measured_speedup:.2f}")
    return start.append("  ".join(parts))
