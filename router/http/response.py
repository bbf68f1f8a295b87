"""The response to a request for generated tokens: whole, or streamed as server-sent events.

    ChoiceStream.deltas() of each choice --merge_streams--> ResponseFormatter --bytes--> send()

``GenerationResponse._send_stream`` is where the bytes of a token are sent to the client; the
tokens come from ``router/generation/choice_stream.py``. Nothing is sent before the first text, so
that an earlier error has its HTTP status. A later error is an event of its own, and the stream
ends without ``[DONE]``: a client can always tell that it is not complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from router.common.errors import ApiError, internal_error
from router.common.request_body import ClientDisconnected
from router.generation.choice_stream import ChoiceStream
from router.generation.choice_text import ChoiceDelta
from router.generation.explain import Explanation, explain_submissions
from router.generation.submission import event_timeline
from router.openai.answers.formatter import FinishedChoice, ResponseFormatter
from router.openai.answers.wire_json import Usage, UsageField
from router.settings import RouterSettings
from router.tenants.accounts import RequestAccount, ResponseEnd

log = logging.getLogger(__name__)

Item = TypeVar("Item")

STREAM_MEDIA_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADERS = [
    (b"content-type", STREAM_MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_THREAD_TOKENS = 256  # a response with more log-probabilities than this is formatted in a thread
_STUCK_S = 30.0  # beyond its deadline: for a client that neither reads nor hangs up


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
        self._has_started = False  # the HTTP head has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In a task of its own a chunk wakes only the coroutines of the response. Here it would wake
        # those of all middleware as well, which take a tenth of a chunk's time.
        await asyncio.create_task(self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = "cancelled"
        watcher = asyncio.create_task(self._watch_disconnect(receive))
        try:
            async with asyncio.timeout(self._settings.request_timeout_s + _STUCK_S):
                self._account.enter(len(self._choices))
                await self._start_choices()
                await (self._send_stream(send) if self._options.stream else self._send_whole(send))
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
            log.error("request %s failed", self._options.id, exc_info=error)
            shown = internal_error("the router failed on this request")
            await self._send_error(shown, scope, receive, send)
        finally:
            watcher.cancel()
            for choice in self._choices:
                choice.close(status)
            self._close_account(status)

    async def _start_choices(self) -> None:
        """Submit all choices. Raises ApiError where there is no place for all of them, or where the
        first cannot be submitted."""
        for choice in self._choices:
            choice.reserve()
        for choice in self._choices:
            choice.start()
            if len(self._choices) > 1:
                await asyncio.sleep(0)  # placing many takes a while; streams go on

    def _close_account(self, status: str) -> None:
        """Count what was used. Without a first token no prompt counts as served."""
        usage = self._usage()
        has_begun = status == "ok" or any(choice.text.output_tokens for choice in self._choices)
        self._account.close(
            ResponseEnd(
                self._options.id,
                status,
                usage.prompt_tokens if has_begun else 0,
                usage.prompt_tokens_details.cached_tokens if has_begun else 0,
                usage.completion_tokens,
            )
        )

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for choice in self._choices:
            choice.disconnect()

    async def _send_stream(self, send: Send) -> None:
        unfinished = len(self._choices)
        if unfinished == 1:  # without the generators that several choices need
            choice, finish = self._choices[0], None
            while finish is None:
                delta = await choice.next_delta()
                finish = delta.finish
                await self._send_deltas(send, (delta,), more=finish is None)
            return
        deltas = [choice.deltas() for choice in self._choices]
        async with aclosing(merge_streams(deltas)) as batches:
            async for batch in batches:
                unfinished -= sum(delta.finish is not None for delta in batch)
                await self._send_deltas(send, batch, more=unfinished > 0)

    async def _send_deltas(self, send: Send, batch: Sequence[ChoiceDelta], *, more: bool) -> None:
        usage = self._usage_so_far()
        format_events = self._formatter.events
        data = b"".join([format_events(delta, usage) for delta in batch])
        if not more:
            data += self._formatter.closing(self._usage(), self._explanation())
        if not data:
            return
        if not self._has_started:
            await self._send_head(send, STREAM_HEADERS)
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_whole(self, send: Send) -> None:
        choices = await self._finished_choices()
        content = (choices, self._usage(), self._explanation())
        if sum(len(c.shown) + len(c.prompt_logprobs) for c in choices) > _THREAD_TOKENS:
            body = await asyncio.to_thread(self._formatter.response, *content)
        else:
            body = self._formatter.response(*content)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send_head(send, headers)
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

    async def _send_head(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        self._account.begin()
        limits = self._account.headers()
        headers = [*headers, *((k.encode(), v.encode()) for k, v in limits.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._has_started:
            error.headers.update(self._account.headers())
            await self._error_response(error)(scope, receive, send)
            return
        last = self._formatter.failed(error, self._usage())
        await send({"type": "http.response.body", "body": last, "more_body": False})

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
        )

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
    )


def best_choices(
    choices: Sequence[FinishedChoice], n: int, candidates: int
) -> list[FinishedChoice]:
    """Return the ``n`` best of each prompt's ``candidates``, best first, with new indexes.

    The best has the greatest log-probability per token, as in OpenAI's ``best_of``.
    """
    if n == candidates:
        return list(choices)
    kept = []
    for _, group in groupby(choices, lambda choice: choice.choice // candidates):
        kept += sorted(group, key=lambda choice: -choice.logprob)[:n]
    return [choice._replace(choice=index) for index, choice in enumerate(kept)]


async def merge_streams(sources: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[list[Item]]:
    """Yield what has arrived from any source since the last item, until all sources have ended.

    Raises what the first source raises. The queue holds as many items as there are sources: a slow
    reader makes the sources wait. Close it (``aclosing``) when it is left early.
    """
    if len(sources) == 1:
        async for item in sources[0]:
            yield [item]
        return
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    running = len(pumps)
    try:
        while running:
            entries = [await queue.get()]
            while not queue.empty():
                entries.append(queue.get_nowait())
            items: list[Item] = []
            for entry in entries:
                if isinstance(entry, Exception):
                    raise entry
                if entry is None:
                    running -= 1
                else:
                    items.append(entry)
            if items:
                yield items
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: AsyncIterator[Item], queue: asyncio.Queue[Item | Exception | None]) -> None:
    try:
        async for item in source:
            await queue.put(item)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
