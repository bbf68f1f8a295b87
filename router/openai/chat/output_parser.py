"""``OutputParser``: the text of one choice becomes reasoning, content and tool calls.

    text --ReasoningParser--> text outside of the reasoning --ToolParser--> content, calls

All emitters of chats format ``ParsedDelta`` and know no syntax of a model.
"""

from __future__ import annotations

from router.openai.chat.output_plan import OutputPlan
from router.openai.reasoning.reasoning_parser import ReasoningDelta as ReasoningDelta
from router.openai.tool_calls.tool_parser import CallArgumentsDelta, CallStart, ContentDelta

_REPLACEMENT = "\ufffd"
"""What a detokenizer writes for the first bytes of a character at the end of an output."""

ParsedDelta = ReasoningDelta | ContentDelta | CallStart | CallArgumentsDelta


class OutputParser:
    """The parser of one choice: ``push`` for each text, with ``last`` for the last one."""

    def __init__(self, plan: OutputPlan) -> None:
        self._reasoning = plan.new_reasoning_parser()
        self._hides_reasoning = plan.hides_reasoning
        self.has_hidden = False
        """Whether there was reasoning that is not shown."""
        self._tools = plan.new_parser()

    @property
    def is_text_alone(self) -> bool:
        """Return whether every further text is content as it comes."""
        return self._reasoning is None and self._tools is None

    def is_reasoning_alone(self, text: str) -> bool:
        """Return whether the next ``text`` is shown as reasoning as it is. Then it need not be
        pushed."""
        reasoning = self._reasoning
        return reasoning is not None and reasoning.takes(text) and not self._hides_reasoning

    @property
    def called(self) -> bool:
        """Return whether there are tool calls, of which the last one is complete."""
        return self._tools is not None and self._tools.called and not self.has_open_call

    @property
    def has_open_call(self) -> bool:
        """Return whether the last tool call is not complete."""
        return self._tools is not None and self._tools.has_open_call

    def push(self, text: str, *, last: bool) -> list[ParsedDelta]:
        """Return what ``text`` completes, in order; adjacent pieces are of different kinds."""
        pieces: list[ParsedDelta] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text, last=last)
            if reasoning and self._hides_reasoning:
                self.has_hidden = True
            elif reasoning:
                pieces.append(ReasoningDelta(reasoning))
            if self._reasoning.done:
                self._reasoning = None
        if self._tools is None:
            if text:
                pieces.append(ContentDelta(text))
            return pieces
        whole = text.rstrip(_REPLACEMENT) if last else text
        pieces += self._tools.push(whole)
        if last:
            pieces += self._tools.flush(text[len(whole) :])
        return pieces
