"""Writes calls as models of each family do, for the tests of grammars and parsers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.openai.tool_calls.families.gemma import written as gemma_value
from router.openai.tool_calls.families.pythonic import written as argument
from router.openai.tool_calls.marked_calls import MarkedCalls
from router.openai.tool_calls.tool_parser import (
    CallArgumentsDelta,
    CallStart,
    ContentDelta,
    ParsedDelta,
    ToolParser,
)
from router.openai.tool_calls.tool_syntax import ToolCallSyntax

Calls = list[tuple[str, str]]
"""Name and arguments of each call."""


def written(syntax: ToolCallSyntax, *calls: tuple[str, str]) -> str:
    """Return the text of calls, whose arguments are JSON."""
    bodies = [_call(syntax, name, given) for name, given in calls]
    return syntax.begin + syntax.between.join(bodies) + syntax.end


def _call(syntax: ToolCallSyntax, name: str, given: str) -> str:
    if isinstance(syntax, MarkedCalls):
        return syntax.open + name + syntax.middle + given + syntax.close
    if syntax.name == "gemma4":
        return f"call:{name}{gemma_value(json.loads(given))}"
    if syntax.name == "pythonic":
        parts = (f"{key}={argument(value)}" for key, value in json.loads(given).items())
        return f"{name}({', '.join(parts)})"
    values = json.loads(given).items()
    return f"<function={name}>\n{''.join(_parameter(*one) for one in values)}</function>"


def _parameter(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<parameter={key}>\n{text}\n</parameter>\n"


def run(parser: ToolParser, pieces: Sequence[str]) -> tuple[str, Calls]:
    """Return the content and the calls in a text that comes in pieces."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.flush()])


def joined(deltas: Sequence[ParsedDelta]) -> tuple[str, Calls]:
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    names = [d.name for d in deltas if isinstance(d, CallStart)]
    given = [
        "".join(d.text for d in deltas if isinstance(d, CallArgumentsDelta) and d.call == i)
        for i in range(len(names))
    ]
    return content, list(zip(names, given, strict=True))
