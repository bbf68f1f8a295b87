"""``ResponsesFormatter``: writes the answers of ``/v1/responses``.

    response.created, response.in_progress    once the request is admitted
    items with their deltas                   as the model writes them (``item_writer``)
    response.completed | incomplete | failed  at the end

One item is open at a time; a response has one choice.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.common.errors import ApiError
from router.generation.choice_text import ChoiceDelta, FinishReason
from router.generation.explain import Explanation
from router.generation.output_text import SentToken
from router.openai.answers.formatter import FinishedChoice, ResponseHeader, TokenNaming
from router.openai.answers.wire_json import Usage, UsageField, encode
from router.openai.chat.output_parser import OutputParser
from router.openai.chat.output_plan import OutputPlan
from router.openai.responses.body import ResponsesBody
from router.openai.responses.failures import failure_of
from router.openai.responses.item_writer import ItemWriter
from router.openai.responses.message_logprobs import MessageTokens
from router.openai.responses.output_items import EventCounter
from router.openai.responses.response_json import (
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    OutputDetails,
    ResponseObject,
    ResponseUsage,
)
from router.openai.tool_calls.tool_parser import ContentDelta

_CUT = IncompleteDetails("max_output_tokens")


class ResponsesFormatter:
    """The formatter of one request; ``output`` parses the text of its only choice."""

    def __init__(
        self,
        header: ResponseHeader,
        body: ResponsesBody,
        output: OutputPlan,
        naming: TokenNaming,
    ) -> None:
        self._naming = naming
        self._blank = blank_response(header, body)
        self._output = output
        self._body = body
        self._events = EventCounter()
        self._parser = OutputParser(output)
        self._tokens = self._new_tokens(streamed=True)
        self._writer = self._new_writer(self._tokens)
        self._finish: FinishReason = "stop"
        self._has_opened = False

    def opening(self) -> bytes:
        if self._has_opened:
            return b""
        self._has_opened = True
        return self._lifecycle("created", self._blank) + self._lifecycle("in_progress", self._blank)

    def events(self, delta: ChoiceDelta, usage: UsageField) -> bytes:
        data = b"" if self._has_opened else self.opening()
        last = delta.finish is not None
        if self._tokens is not None:
            parser, writer = self._parser, self._writer
            data += _write(delta.text, delta.shown, self._tokens, parser, writer, last=last)
        elif not last and self._parser.is_text_alone:
            return data + self._writer.text(delta.text) if delta.text else data
        else:
            data += self._writer.write(self._parser.push(delta.text, last=last))
        if delta.finish is not None:
            self._finish = delta.finish
            data += self._writer.finish(_item_status(delta.finish, self._parser))
        return data

    def closing(self, usage: Usage, baton: Explanation | UnsetType) -> bytes:
        cut = self._finish == "length"
        # Codex takes an incomplete response for an error, which it retries: a response is
        # incomplete only where the client itself has set the limit.
        bounded = self._body.fields.max_output_tokens is not None
        status: Literal["completed", "incomplete"] = (
            "incomplete" if cut and bounded else "completed"
        )
        response = self._response(self._writer, usage, status=status, cut=cut, baton=baton)
        return self.opening() + self._lifecycle(status, response)

    def keep_alive(self) -> bytes:
        """Return the state so far: Codex does not count comments as a sign of life."""
        now = msgspec.structs.replace(self._blank, output=self._writer.done)
        return self.opening() + self._lifecycle("in_progress", now)

    def failed(self, error: ApiError, usage: Usage) -> bytes:
        response = msgspec.structs.replace(
            self._blank,
            status="failed",
            output=self._writer.done,
            error=failure_of(error),
            usage=_response_usage(usage),
        )
        return self.opening() + self._lifecycle("failed", response)

    def response(
        self, choices: list[FinishedChoice], usage: Usage, baton: Explanation | UnsetType
    ) -> bytes:
        choice, parser, tokens = choices[0], OutputParser(self._output), self._new_tokens()
        writer = self._new_writer(tokens)
        if tokens is None:
            writer.write(parser.push(choice.text, last=True))
        else:
            _write(choice.text, choice.shown, tokens, parser, writer, last=True)
        writer.finish(_item_status(choice.finish, parser))
        cut = choice.finish == "length"
        status: Literal["completed", "incomplete"] = "incomplete" if cut else "completed"
        return encode(self._response(writer, usage, status=status, cut=cut, baton=baton))

    def _new_tokens(self, *, streamed: bool = False) -> MessageTokens | None:
        logged = self._body.generation.logprobs
        return MessageTokens(self._naming, streamed=streamed) if logged else None

    def _new_writer(self, tokens: MessageTokens | None) -> ItemWriter:
        parallel = self._body.fields.parallel_tool_calls
        return ItemWriter(self._body.tools, self._events, parallel=parallel, logged=tokens)

    def _response(
        self,
        writer: ItemWriter,
        usage: Usage,
        *,
        status: Literal["completed", "incomplete"],
        cut: bool,
        baton: Explanation | UnsetType,
    ) -> ResponseObject:
        return msgspec.structs.replace(
            self._blank,
            status=status,
            output=writer.done,
            incomplete_details=_CUT if cut else None,
            usage=_response_usage(usage),
            baton=baton,
        )

    def _lifecycle(self, name: str, response: ResponseObject) -> bytes:
        return self._events.event(name, {"response": response})


def failed_stream(header: ResponseHeader, body: ResponsesBody, error: ApiError) -> bytes:
    """Return a whole stream for a request that failed before its first token."""
    events, blank = EventCounter(), blank_response(header, body)
    failed = msgspec.structs.replace(blank, status="failed", error=failure_of(error))
    created = events.event("created", {"response": blank})
    return created + events.event("failed", {"response": failed})


def blank_response(header: ResponseHeader, body: ResponsesBody) -> ResponseObject:
    """Return the response before its first token."""
    chat, fields = body.generation, body.fields
    return ResponseObject(
        id=header.id,
        created_at=header.created,
        status="in_progress",
        model=header.model,
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        metadata=dict(chat.metadata or {}),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning=_shown_reasoning(fields.reasoning),
        temperature=chat.temperature,
        text={"format": {"type": "text"}, **(fields.text or {})},
        tool_choice=fields.tool_choice or "auto",
        tools=fields.tools or [],
        top_logprobs=fields.top_logprobs,
        top_p=chat.top_p,
    )


def _write(
    text: str,
    shown: list[SentToken],
    tokens: MessageTokens,
    parser: OutputParser,
    writer: ItemWriter,
    *,
    last: bool,
) -> bytes:
    """Return the events for a text that is parsed token by token, so that each piece of a message
    has its own tokens."""
    events = []
    for part in tokens.split(text, shown):
        pieces = parser.push(part, last=False)
        events.append(writer.write(pieces))
        if pieces and not any(isinstance(piece, ContentDelta) for piece in pieces):
            tokens.drop()
    if last:
        events.append(writer.write(parser.push("", last=True)))
    return b"".join(events)


def _shown_reasoning(reasoning: dict[str, Any] | None) -> dict[str, Any]:
    """Return the reasoning options with the names that SDKs expect."""
    return {"effort": None, "summary": None, **(reasoning or {})}


def _item_status(finish: FinishReason, parser: OutputParser) -> ItemStatus:
    return "incomplete" if finish == "length" or parser.has_open_call else "completed"


def _response_usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(0 if details is UNSET else details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
