"""The fields of a chat about reasoning: its effort, its longest length, and whether it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(NamedTuple):
    """What a client asks about the reasoning."""

    hidden: bool = False  # not shown to the client
    budget: int | None = None  # most tokens; None: any number
    is_over: bool = False  # the output continues a text of the answer


def template_options(
    effort: ReasoningEffort | None, given: Mapping[str, Any] | None, known: Sequence[str] = ()
) -> dict[str, Any]:
    """Return variables for the chat template: those that the client has ``given``, and the effort.

    An effort also turns the thinking on or off, by the names that templates have for it. ``known``:
    the efforts that the template takes, the highest last; others become that one. Empty: all.
    """
    if effort is None:
        return dict(given or {})
    thinks = effort != "none"
    taken = effort if effort in known or not known else known[-1]
    effects = {"reasoning_effort": taken, "enable_thinking": thinks, "thinking": thinks}
    return {**effects, **(given or {})}
