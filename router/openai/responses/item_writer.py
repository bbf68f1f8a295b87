"""``ItemWriter``: the parsed output of a model becomes items and their events.

ReasoningDelta --> OpenReasoning --+
ContentDelta   --> OpenMessage   --+--> done items, in the order in which they were added
CallStart, CallArgumentsDelta  ----+
"""

from __future__ import annotations

from collections.abc import Sequence

from router.openai.chat.output_parser import ParsedDelta, ReasoningDelta
from router.openai.responses.message_logprobs import LoggedMessage, MessageTokens
from router.openai.responses.output_items import (
    EventCounter,
    OpenCall,
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OpenSearchCall,
)
from router.openai.responses.response_json import ItemStatus, OutputItem
from router.openai.responses.tools import ToolKind, ToolSet
from router.openai.tool_calls.tool_parser import CallStart, ContentDelta

_CALLS: dict[ToolKind, type[OpenCall]] = {
    "function": OpenFunctionCall,
    "custom": OpenCustomCall,
    "tool_search": OpenSearchCall,
}


class ItemWriter:
    """Writes the items of one response. ``parallel``: whether it may hold more than one call;
    ``logged``: the tokens of its output, if messages show their log-probabilities."""

    def __init__(
        self,
        tools: ToolSet,
        events: EventCounter,
        *,
        parallel: bool,
        logged: MessageTokens | None = None,
    ) -> None:
        self.done: list[OutputItem] = []
        self._tools = tools
        self._events = events
        self._logged = logged
        self._max_calls = None if parallel else 1
        self._open: OpenItem | None = None
        self._call = -1  # index of the open call
        self._calls = 0
        self._blank = ""  # white space between items, dropped unless text follows

    def write(self, pieces: Sequence[ParsedDelta]) -> bytes:
        """Return the events for what the parser found."""
        return b"".join([self._piece(piece) for piece in pieces])

    def text(self, text: str) -> bytes:
        """Return the events for more of the message."""
        if isinstance(self._open, OpenMessage):
            return self._open.push(text)
        text = self._blank + text
        if (self.done or self._open) and not text.strip():
            self._blank = text
            return b""
        return self._begin(self._new_message()) + self._push(text)

    def close(self, status: ItemStatus) -> bytes:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return b""
        data = self._open.close(status)
        self.done.append(self._open.item(status))
        self._open, self._call = None, -1
        return data

    def finish(self, status: ItemStatus) -> bytes:
        """End the output; one without any item gets an empty message."""
        if self._open or self.done:
            return self.close(status)
        return self._begin(self._new_message()) + self.close(status)

    def _piece(self, piece: ParsedDelta) -> bytes:
        if isinstance(piece, ContentDelta):
            return self.text(piece.text)
        if isinstance(piece, ReasoningDelta):
            if isinstance(self._open, OpenReasoning):
                return self._open.push(piece.text)
            opened = self._begin(OpenReasoning(self._events, self._next_index()))
            return opened + self._push(piece.text)
        if isinstance(piece, CallStart):
            return self._start_call(piece)
        return self._push(piece.text) if piece.call == self._call else b""

    def _start_call(self, start: CallStart) -> bytes:
        if self._max_calls is not None and self._calls >= self._max_calls:
            return self.close("completed")
        self._calls += 1
        tool = self._tools.find(start.name)
        item = _CALLS[tool.kind](self._events, self._next_index(), start.id, tool.name)
        data = self._begin(item)
        self._call = start.call
        return data

    def _begin(self, item: OpenItem) -> bytes:
        data = self.close("completed")
        self._blank = ""
        self._open = item
        return data + item.opening()

    def _push(self, text: str) -> bytes:
        assert self._open is not None
        return self._open.push(text)

    def _new_message(self) -> OpenMessage:
        events, index = self._events, self._next_index()
        if self._logged is None:
            return OpenMessage(events, index)
        return LoggedMessage(events, index, self._logged)

    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)
