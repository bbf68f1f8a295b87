"""The items of a response's output while they are written, and the events that tell of them.

    added --push(text), again and again--> deltas --close(status)--> done

One item is open at a time. ``ItemWriter`` (``item_writer``) creates and closes them. Each event has
a rising ``sequence_number``, which ``EventCounter`` gives out.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from router.openai.answers.formatter import sse_event
from router.openai.answers.wire_json import encode
from router.openai.responses.custom_input import CustomInputScanner
from router.openai.responses.response_json import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
    SearchCallItem,
)
from router.openai.responses.tools import ToolName


class EventCounter:
    """Makes the events of one stream and counts them."""

    def __init__(self) -> None:
        self.sent = 0

    def event(self, name: str, fields: dict[str, Any]) -> bytes:
        kind = f"response.{name}"
        payload = encode({"type": kind, "sequence_number": self.sent, **fields})
        self.sent += 1
        return sse_event(payload, kind.encode())

    def delta(self, head: bytes, text: str, tail: bytes) -> bytes:
        """Return an event of which only number and text are encoded anew."""
        number, self.sent = self.sent, self.sent + 1
        return b"%b%d%b%b%b" % (head, number, _DELTA, encode(text), tail)


_DELTA = b',"delta":'


class OpenItem(ABC):
    """An item that is being written. Subclasses are the kinds of items."""

    prefix: ClassVar[str]  # of ids

    def __init__(self, events: EventCounter, index: int) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(16)}"
        self._events = events
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as it stands."""

    def opening(self) -> bytes:
        """Return the events that announce the item, without any text."""
        item = msgspec.to_builtins(self.item("in_progress"))
        return self._event("output_item.added", output_index=self._index, item=item)

    @abstractmethod
    def push(self, text: str) -> bytes:
        """Return the events for more text."""

    def close(self, status: ItemStatus) -> bytes:
        """Return the events that end the item."""
        item = msgspec.to_builtins(self.item(status))
        return self._event("output_item.done", output_index=self._index, item=item)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        return self._events.event(event, fields)

    def _located(self, event: str, /, **fields: Any) -> bytes:
        return self._event(event, item_id=self.id, output_index=self._index, **fields)


class _OpenText(OpenItem):
    """An item with one part of text."""

    name: ClassVar[str]  # of the part in events
    tail: ClassVar[bytes]  # of a delta's JSON

    def __init__(self, events: EventCounter, index: int) -> None:
        super().__init__(events, index)
        kind = f"response.{self.name}.delta"
        self._head = (
            f"event: {kind}\ndata: "
            f'{{"type":"{kind}","item_id":"{self.id}","output_index":{index},"content_index":0,'
            '"sequence_number":'
        ).encode()

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """Return the part with this text."""

    @abstractmethod
    def done(self, text: str) -> dict[str, Any]:
        """Return the fields of the event that repeats the whole text."""

    def opening(self) -> bytes:
        data = super().opening()
        return data + self._located("content_part.added", content_index=0, part=self.part(""))

    def push(self, text: str) -> bytes:
        self._texts.append(text)
        return self._events.delta(self._head, text, self.tail)

    def close(self, status: ItemStatus) -> bytes:
        text = self.text
        data = self._located(f"{self.name}.done", content_index=0, **self.done(text))
        data += self._located("content_part.done", content_index=0, part=self.part(text))
        return data + super().close(status)


class OpenReasoning(_OpenText):
    prefix = "rs"
    name = "reasoning_text"
    tail = b"}\n\n"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def done(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def item(self, status: ItemStatus) -> OutputItem:
        content = [ReasoningTextPart(self.text)] if self._texts else []
        return ReasoningItem(id=self.id, content=content, status=status)


class OpenMessage(_OpenText):
    prefix = "msg"
    name = "output_text"
    tail = b',"logprobs":[]}\n\n'

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def done(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": []}

    def item(self, status: ItemStatus) -> MessageItem:
        content = [OutputTextPart(self.text)] if self._texts or status != "in_progress" else []
        return MessageItem(id=self.id, content=content, status=status)


class OpenCall(OpenItem):
    """A call; ``call_id`` is what its output will refer to."""

    def __init__(self, events: EventCounter, index: int, call_id: str, name: ToolName) -> None:
        super().__init__(events, index)
        self._call_id = call_id
        self._name = name.name
        self._namespace = name.namespace or UNSET


class OpenFunctionCall(OpenCall):
    prefix = "fc"

    def push(self, text: str) -> bytes:
        self._texts.append(text)
        return self._located("function_call_arguments.delta", delta=text) if text else b""

    def close(self, status: ItemStatus) -> bytes:
        done = self._located("function_call_arguments.done", name=self._name, arguments=self.text)
        return done + super().close(status)

    def item(self, status: ItemStatus) -> OutputItem:
        return FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace,
            arguments=self.text,
            status=status,
        )


class OpenCustomCall(OpenCall):
    """A custom tool's call: its input is taken out of the arguments while they come."""

    prefix = "ctc"

    def __init__(self, events: EventCounter, index: int, call_id: str, name: ToolName) -> None:
        super().__init__(events, index, call_id, name)
        self._scanner = CustomInputScanner()

    def push(self, text: str) -> bytes:
        return self._push_input(self._scanner.push(text))

    def close(self, status: ItemStatus) -> bytes:
        data = self._push_input(self._scanner.flush())
        data += self._located("custom_tool_call_input.done", input=self.text)
        return data + super().close(status)

    def item(self, status: ItemStatus) -> OutputItem:
        return CustomCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace,
            input=self.text,
            status=status,
        )

    def _push_input(self, text: str) -> bytes:
        self._texts.append(text)
        return self._located("custom_tool_call_input.delta", delta=text) if text else b""


class OpenSearchCall(OpenCall):
    """A search for tools, which the client executes; its arguments are sent whole."""

    prefix = "tsc"

    def push(self, text: str) -> bytes:
        self._texts.append(text)
        return b""

    def item(self, status: ItemStatus) -> OutputItem:
        return SearchCallItem(
            id=self.id,
            call_id=self._call_id,
            arguments={} if status == "in_progress" else _parsed(self.text),
            status=status,
        )


def _parsed(text: str) -> Any:
    """Return the JSON in ``text``, or the text itself where it was cut."""
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
