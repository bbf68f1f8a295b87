"""DeepSeek's models. Their marks hold a full-width vertical line."""
# ruff: noqa: RUF001

from __future__ import annotations

from router.openai.tool_calls.marked_calls import MarkedCalls

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"

DEEPSEEK_V3 = MarkedCalls(
    "deepseek_v3",
    trigger=_BEGIN,
    begin=_BEGIN,
    between="\n",
    end=_END,
    open=f"{_OPEN}function{_SEPARATOR}",
    middle="\n```json\n",
    close=f"\n```{_CLOSE}",
    signs=(_BEGIN, "```json"),
)
"""DeepSeek V3, V3-0324, R1 and R1-0528."""

DEEPSEEK_V31 = MarkedCalls(
    "deepseek_v31",
    trigger=_BEGIN,
    begin=_BEGIN,
    between="",
    end=_END,
    open=_OPEN,
    middle=_SEPARATOR,
    close=_CLOSE,
    without=("```json",),
)
"""DeepSeek V3.1."""
