"""The response to a request for generated tokens: whole, or streamed as server-sent events.

    ChoiceStream.deltas() of each choice --merge_streams--> ResponseFormatter --bytes--> EventSender

``GenerationResponse._send_stream`` is where the bytes of a token are sent to the client; the
tokens come from ``router/generation/choice_stream.py``. The head of a stream goes out with its
first event, and soon after admission in any case: an error that comes earlier has its HTTP status.
A later error is an event of its own, and the stream ends without ``[DONE]``: a client can always
tell that it is not complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Message, Receive, Scope, Send

from router.common.errors import ApiError, internal_error
from router.common.request_body import ClientDisconnected
from router.generation.choice_stream import ChoiceStream
from router.generation.choice_text import ChoiceDelta
from router.generation.explain import Explanation, explain_submissions
from router.generation.submission import event_timeline
from router.http.streams.choice_merge import best_choices, merge_streams
from router.http.streams.event_sender import STUCK_S, EventSender
from router.observation.request_record import GenerationRecord, choice_record, record_of
from router.openai.answers.formatter import FinishedChoice, ResponseFormatter
from router.openai.answers.wire_json import Usage, UsageField
from router.settings import RouterSettings
from router.tenants.accounts import RequestAccount, ResponseEnd

log = logging.getLogger(__name__)

STREAM_MEDIA_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADERS = [
    (b"content-type", STREAM_MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_THREAD_TOKENS = 256  # a response with more log-probabilities than this is formatted in a thread


class ResponseOptions(NamedTuple):
    """What the client asked about its response."""

    id: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    arrived: float  # on time.perf_counter
    explain: bool
    timeline: bool
    n: int  # choices of each prompt that are returned: the best of ``candidates``
    candidates: int
    headers: Mapping[str, str] = {}  # of a response that is no error


class GenerationResponse(Response):
    """One response with all of its choices. Created by ``accept_request``, run by the server.

    created --__call__--> choices started --> deltas sent --> choices closed, whatever happened
    """

    def __init__(
        self,
        settings: RouterSettings,
        options: ResponseOptions,
        formatter: ResponseFormatter,
        choices: list[ChoiceStream],
        account: RequestAccount,
        error_response: Callable[[ApiError], Response],
    ) -> None:
        super().__init__()
        self._settings = settings
        self._options = options
        self._formatter = formatter
        self._choices = choices
        self._account = account
        self._error_response = error_response
        self._sender: EventSender | None = None  # of a stream
        self._limit: asyncio.Timeout | None = None  # on sends; choices limit the wait for tokens
        self._has_begun = False  # the first tokens have come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In a task of its own a chunk wakes only the coroutines of the response. Here it would wake
        # those of all middleware as well, which take a tenth of a chunk's time.
        await asyncio.create_task(self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = "cancelled"
        watcher = asyncio.create_task(self._watch_disconnect(receive))
        try:
            async with asyncio.timeout(None) as self._limit:
                self._account.enter(len(self._choices))
                await self._start_choices()
                if self._options.stream:
                    await self._send_stream(send, scope.get("state", {}).get("send_body", send))
                else:
                    await self._send_whole(send)
            status = "ok"
        except ClientDisconnected:
            pass
        except TimeoutError:  # stuck in a send: leaving the response unfinished closes it
            status = "504"
        except ApiError as error:
            status = str(error.status)
            await self._send_error(error, scope, receive, send)
        except Exception as error:
            status = "500"
            log.error("request %s failed", self._choices[0].request_id, exc_info=error)
            shown = internal_error("the router failed on this request")
            await self._send_error(shown, scope, receive, send)
        finally:
            watcher.cancel()
            if self._sender is not None:
                self._sender.close()
            for choice in self._choices:
                choice.close(status)
            end = self._close_account(status)
            record = record_of(scope)
            if record is not None:
                record.generation = self._generation_record(end)

    async def _start_choices(self) -> None:
        """Submit all choices. Raises ApiError where there is no place for all of them, or where the
        first cannot be submitted."""
        for choice in self._choices:
            choice.reserve()
        for choice in self._choices:
            choice.start()
            if len(self._choices) > 1:
                await asyncio.sleep(0)  # placing many takes a while; streams go on

    def _close_account(self, status: str) -> ResponseEnd:
        """Count what was used, and return it. Without a first token no prompt counts as served."""
        usage = self._usage()
        has_begun = status == "ok" or any(choice.text.output_tokens for choice in self._choices)
        end = ResponseEnd(
            self._options.id,
            status,
            usage.prompt_tokens if has_begun else 0,
            usage.prompt_tokens_details.cached_tokens if has_begun else 0,
            usage.completion_tokens,
        )
        self._account.close(end)
        return end

    def _generation_record(self, end: ResponseEnd) -> GenerationRecord:
        arrived = self._options.arrived
        choices = [choice_record(arrived, c.token_times, c.submissions) for c in self._choices]
        tokens = (end.prompt_tokens, end.cached_tokens, end.output_tokens)
        return GenerationRecord(arrived, end.id, end.status, *tokens, choices)

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for choice in self._choices:
            choice.disconnect()

    async def _send_stream(self, send: Send, send_body: Send) -> None:
        sender = self._sender = EventSender(
            *(send, send_body, lambda: self._head(STREAM_HEADERS), self._formatter.keep_alive),
            *(self._settings.keep_alive_s, lambda: self._limit_send(0.0)),
        )
        await sender.open(self._formatter.opening())
        unfinished = len(self._choices)
        if unfinished == 1:  # without the generators that several choices need
            choice, finish = self._choices[0], None
            while finish is None:
                delta = await choice.next_delta()
                finish = delta.finish
                data = self._formatter.events(delta, self._usage_so_far())
                if not self._has_begun:
                    self._begin()
                if finish is not None:
                    await self._send_last(sender, data)
                elif data:
                    await sender.send(data)
            return
        deltas = [choice.deltas() for choice in self._choices]
        async with aclosing(merge_streams(deltas)) as batches:
            async for batch in batches:
                unfinished -= sum(delta.finish is not None for delta in batch)
                usage, format_events = self._usage_so_far(), self._formatter.events
                data = b"".join([format_events(delta, usage) for delta in batch])
                if not self._has_begun:
                    self._begin()
                if not unfinished:
                    await self._send_last(sender, data)
                elif data:
                    await sender.send(data)

    def _begin(self) -> None:
        self._has_begun = True
        self._account.begin()

    async def _send_last(self, sender: EventSender, data: bytes) -> None:
        data += self._formatter.closing(self._usage(), self._explanation())
        await sender.send(data, more=False)

    def _limit_send(self, seconds: float) -> None:
        assert self._limit is not None
        self._limit.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _send_whole(self, send: Send) -> None:
        choices = await self._finished_choices()
        content = (choices, self._usage(), self._explanation())
        if sum(choice.reported_tokens for choice in choices) > _THREAD_TOKENS:
            body = await asyncio.to_thread(self._formatter.response, *content)
        else:
            body = self._formatter.response(*content)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        self._begin()
        self._limit_send(STUCK_S)
        await send(self._head(headers))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _finished_choices(self) -> list[FinishedChoice]:
        """Wait for the end of all choices and return the best ``n`` of each prompt."""
        deltas: list[list[ChoiceDelta]] = [[] for _ in self._choices]
        streams = [choice.deltas() for choice in self._choices]
        async with aclosing(merge_streams(streams)) as batches:
            async for batch in batches:
                for delta in batch:
                    deltas[delta.choice].append(delta)
        finished = [
            _finished(choice, parts) for choice, parts in zip(self._choices, deltas, strict=True)
        ]
        return best_choices(finished, self._options.n, self._options.candidates)

    def _head(self, headers: list[tuple[bytes, bytes]]) -> Message:
        own = {**self._account.headers(), **self._options.headers}
        headers = [*headers, *((k.encode(), v.encode()) for k, v in own.items())]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _send_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._sender is not None and self._sender.has_started:
            events = self._formatter.failed(error, self._usage())
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as self._limit:
                    await self._sender.send(events, more=False)
            return
        if self._sender is not None:
            self._sender.close()
        error.headers.update(self._account.headers())
        await self._error_response(error)(scope, receive, send)

    def _usage_so_far(self) -> UsageField:
        if self._options.continuous_usage:
            return self._usage()
        return None if self._options.include_usage else UNSET

    def _usage(self) -> Usage:
        """Each prompt counts once; all tokens that were generated count."""
        firsts = self._choices[:: self._options.candidates]
        return Usage.of(
            sum(len(choice.prompt) for choice in firsts),
            sum(choice.text.output_tokens for choice in self._choices),
            sum(choice.cached_tokens for choice in firsts),
            self._reasoning_tokens(),
        )

    def _reasoning_tokens(self) -> int | None:
        """Return the output tokens that were reasoning; None where there is no such thing."""
        counts = [choice.text.reasoning_tokens for choice in self._choices]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _explanation(self) -> Explanation | UnsetType:
        """Return the field ``baton``, as far as the client asked for it."""
        settings, options = self._settings, self._options
        if not (options.explain or options.timeline):
            return UNSET
        explanation = Explanation()
        if options.explain:
            submissions = [(c.index, s) for c in self._choices for s in c.submissions]
            explanation = explain_submissions(settings.goals, submissions)
        if options.timeline:
            events = [event_timeline(options.arrived, c.submissions) for c in self._choices]
            explanation = msgspec.structs.replace(explanation, timeline=events)
        return explanation


def _finished(choice: ChoiceStream, deltas: Sequence[ChoiceDelta]) -> FinishedChoice:
    finish = deltas[-1].finish
    assert finish is not None
    return FinishedChoice(
        choice.index,
        choice.prompt,
        "".join([delta.text for delta in deltas]),
        [token for delta in deltas for token in delta.ids],
        [token for delta in deltas for token in delta.shown],
        finish,
        choice.text.output_logprob / max(1, choice.text.output_tokens),
        choice.text.prompt_logprobs.values,
        deltas[-1].stop,
    )
