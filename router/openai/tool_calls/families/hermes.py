"""Nous Hermes 2 Pro, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from router.openai.tool_calls.marked_calls import MarkedCalls

HERMES = MarkedCalls(
    "hermes",
    trigger="<tool_call>",
    begin="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
