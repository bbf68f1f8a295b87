"""What one choice of a chat says: text to content and tool calls, in OpenAI's shapes."""

from __future__ import annotations

from typing import NamedTuple

from router.chat.parser import CallStart, Content, ToolParser
from router.wire_json import Function, ToolCall


class Said(NamedTuple):
    """``calls``: new ones, and more of the arguments of those before; each at most once."""

    content: str
    calls: list[ToolCall]


class Speech:
    """Text of one choice as it comes. ``parser``: None where all of it is content."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser

    @property
    def called(self) -> bool:
        return self._parser is not None and self._parser.called

    def push(self, text: str, *, last: bool) -> Said:
        if self._parser is None:
            return Said(text, [])
        pieces = self._parser.push(text)
        if last:
            pieces += self._parser.flush()
        content = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
        starts: dict[int, CallStart] = {}
        arguments: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                continue
            if isinstance(piece, CallStart):
                starts[piece.call] = piece
            text = "" if isinstance(piece, CallStart) else piece.text
            arguments[piece.call] = arguments.get(piece.call, "") + text
        return Said(content, [_call(c, starts.get(c), text) for c, text in arguments.items()])


def _call(index: int, start: CallStart | None, arguments: str) -> ToolCall:
    if start is None:
        return ToolCall(index=index, function=Function(arguments=arguments))
    function = Function(name=start.name, arguments=arguments)
    return ToolCall(index=index, id=start.id, type="function", function=function)
