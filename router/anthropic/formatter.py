"""Formats responses of ``/v1/messages``: a message of content blocks, and its events.

    message_start, then for each block: content_block_start, content_block_delta ...,
    content_block_stop; message_delta with the reason of the end and the usage, message_stop

One block is open at a time. ``router.http.anthropic_routes`` creates a formatter for each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from router.anthropic.errors import error_body
from router.anthropic.wire import (
    EVENT_NAMES,
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    Event,
    InputDelta,
    MessageDelta,
    MessageEnd,
    MessageResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
    encode,
)
from router.common.errors import ApiError
from router.generation.choice_text import ChoiceDelta, FinishReason
from router.generation.explain import Explanation
from router.openai.answers.formatter import FinishedChoice, ResponseHeader, sse_event
from router.openai.answers.wire_json import Usage, UsageField
from router.openai.chat.output_parser import OutputParser, ParsedDelta, ReasoningDelta
from router.openai.chat.output_plan import OutputPlan
from router.openai.tool_calls.tool_parser import CallArgumentsDelta, CallStart, ContentDelta

SIGNATURE = "baton"
"""Signature of all reasoning. It proves nothing: clients only need one to send the block back."""

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_NO_INPUT = msgspec.Raw(b"{}")
_EMPTY_TEXT = b'"text":""'  # occurs once in an event with an empty text: strings escape quotes

BlockKind = Literal["text", "thinking", "tool_use"]


class MessageFormatter:
    """The formatter of one request. ``long_names``: name of a tool in the chat -> the client's,
    where they differ."""

    def __init__(
        self,
        header: ResponseHeader,
        output: OutputPlan,
        prompt_tokens: int,
        long_names: Mapping[str, str],
    ) -> None:
        self._header = header
        self._output = output
        self._prompt_tokens = prompt_tokens
        self._long_names = long_names
        self._parser = OutputParser(output)
        self._has_begun = False
        self._open: BlockKind | None = None  # kind of the open block
        self._index = 0  # of the open block, or the next one
        self._around_text: tuple[bytes, bytes] | None = None  # event before and after its text
        self._end = MessageEnd("end_turn", None)

    # ---- streams -----------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Return nothing, so that an error before the first token has its HTTP status. Pings may
        come before ``message_start``."""
        return b""

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = self._message([], MessageUsage(self._prompt_tokens, 0, 0))
        return _event(MessageStart(message))

    def events(self, delta: ChoiceDelta, usage: UsageField) -> bytes:
        last = delta.finish is not None
        if self._open == "text" and self._parser.is_text_alone and not last:
            return self._text_event(delta.text) if delta.text else b""
        data = self._begin()
        for piece in self._parser.push(delta.text, last=last):
            data += self._piece_events(piece)
        if delta.finish is not None:
            data += self._last_block_events()
            self._end = message_end(delta.finish, delta.stop, called=self._parser.called)
        return data

    def closing(self, usage: Usage, baton: Explanation | UnsetType) -> bytes:
        end = MessageDelta(self._end, MessageUsage.of(usage), baton)
        return _event(end) + _event(MessageStop())

    def keep_alive(self) -> bytes:
        return PING

    def failed(self, error: ApiError, usage: Usage) -> bytes:
        return sse_event(error_body(error, self._header.request_id), b"error")

    def _piece_events(self, piece: ParsedDelta) -> bytes:
        if isinstance(piece, ContentDelta):
            data = b"" if self._open == "text" else self._start("text", TextContent(""))
            return data + self._text_event(piece.text)
        if isinstance(piece, ReasoningDelta):
            opens = self._open != "thinking"
            data = self._start("thinking", ThinkingContent("", "")) if opens else b""
            return data + _event(BlockDelta(self._index, ThinkingDelta(piece.text)))
        if isinstance(piece, CallStart):
            return self._start("tool_use", ToolUseContent(piece.id, self._name(piece), _NO_INPUT))
        assert self._open == "tool_use", "arguments follow the start of their call"
        return _event(BlockDelta(self._index, InputDelta(piece.text))) if piece.text else b""

    def _text_event(self, text: str) -> bytes:
        """Format an event with text: only the text is encoded anew."""
        if self._around_text is None:
            event = _event(BlockDelta(self._index, TextDelta("")))
            before, after = event.split(_EMPTY_TEXT)
            self._around_text = before + b'"text":', after
        before, after = self._around_text
        return before + encode(text) + after

    def _start(self, kind: BlockKind, block: Content) -> bytes:
        data = self._stop()
        self._open = kind
        return data + _event(BlockStart(self._index, block))

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open == "thinking":
            data = _event(BlockDelta(self._index, SignatureDelta(SIGNATURE)))
        data += _event(BlockStop(self._index))
        self._open, self._around_text = None, None
        self._index += 1
        return data

    def _last_block_events(self) -> bytes:
        """Close the message's content, which has one block at least: clients look at the first."""
        data = b"" if self._open or self._index else self._start("text", TextContent(""))
        return data + self._stop()

    # ---- whole responses ---------------------------------------------------------------------

    def response(
        self, choices: list[FinishedChoice], usage: Usage, baton: Explanation | UnsetType
    ) -> bytes:
        [choice] = choices
        parser = OutputParser(self._output)
        content = self._content(parser.push(choice.text, last=True))
        end = message_end(choice.finish, choice.stop, called=parser.called)
        return encode(self._message(content, MessageUsage.of(usage), end, baton))

    def _content(self, pieces: list[ParsedDelta]) -> list[Content]:
        """Join the pieces of a whole output to blocks."""
        blocks: list[tuple[ParsedDelta, list[str]]] = []  # first piece, texts
        for piece in pieces:
            if isinstance(piece, CallStart):
                blocks.append((piece, []))
                continue
            is_text = not isinstance(piece, CallArgumentsDelta)
            if is_text and not (blocks and type(blocks[-1][0]) is type(piece)):
                blocks.append((piece, []))
            blocks[-1][1].append(piece.text)
        content = [self._block(first, "".join(texts)) for first, texts in blocks]
        return content or [TextContent("")]

    def _block(self, first: ParsedDelta, text: str) -> Content:
        if isinstance(first, CallStart):
            return ToolUseContent(first.id, self._name(first), tool_input(text))
        if isinstance(first, ReasoningDelta):
            return ThinkingContent(text, SIGNATURE)
        return TextContent(text)

    def _message(
        self,
        content: list[Content],
        usage: MessageUsage,
        end: MessageEnd | None = None,
        baton: Explanation | UnsetType = UNSET,
    ) -> MessageResponse:
        return MessageResponse(
            id=self._header.id,
            model=self._header.model,
            content=content,
            stop_reason=end.stop_reason if end else None,
            stop_sequence=end.stop_sequence if end else None,
            usage=usage,
            baton=baton,
        )

    def _name(self, call: CallStart) -> str:
        return self._long_names.get(call.name, call.name)


def _event(event: Event) -> bytes:
    return sse_event(encode(event), EVENT_NAMES[type(event)])


def message_end(finish: FinishReason, stop: str | None, *, called: bool) -> MessageEnd:
    """Return why a message ended; ``stop``: the stop sequence that the text reached, if any."""
    if finish == "length":
        return MessageEnd("max_tokens", None)
    if stop is not None:
        return MessageEnd("stop_sequence", stop)
    reason: StopReason = "tool_use" if called else "end_turn"
    return MessageEnd(reason, None)


def tool_input(arguments: str) -> msgspec.Raw:
    """Return the arguments of a call as an object. Of arguments that were cut off, what is
    complete."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return _NO_INPUT
    return msgspec.Raw(encode(value)) if isinstance(value, dict) else _NO_INPUT
