"""``OutputParser``: the text of one choice becomes reasoning, content and tool calls.

    text --reasoning--> text outside of it --ToolParser--> content, calls

All emitters of chats format ``ParsedDelta`` and know no syntax of a model.
"""

from __future__ import annotations

from typing import NamedTuple

from router.openai.chat.output_plan import OutputPlan
from router.openai.tool_calls.tool_parser import CallArgumentsDelta, CallStart, ContentDelta


class ReasoningDelta(NamedTuple):
    text: str


ParsedDelta = ReasoningDelta | ContentDelta | CallStart | CallArgumentsDelta


class OutputParser:
    """The parser of one choice: ``push`` for each text, with ``last`` for the last one."""

    def __init__(self, plan: OutputPlan) -> None:
        self._tools = plan.new_parser()

    @property
    def is_text_alone(self) -> bool:
        """Return whether every text is content as it comes."""
        return self._tools is None

    @property
    def called(self) -> bool:
        """Return whether a tool call has begun."""
        return self._tools is not None and self._tools.called

    def push(self, text: str, *, last: bool) -> list[ParsedDelta]:
        """Return what ``text`` completes, in order."""
        if self._tools is None:
            return [ContentDelta(text)] if text else []
        pieces: list[ParsedDelta] = [*self._tools.push(text)]
        if last:
            pieces += self._tools.flush()
        return pieces
