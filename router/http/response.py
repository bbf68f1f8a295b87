"""The answer to a request for generated tokens: whole, or streamed as server-sent events.

Nothing is sent before the first text, so that an error before it has its HTTP status. After it, an
error is a frame of its own and the stream ends without ``[DONE]``: never silently short.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from fastapi import Response
from msgspec import UNSET
from starlette.types import Message, Receive, Scope, Send

from router.common.errors import ApiError, failed
from router.common.merge_streams import merged
from router.common.request_body import ClientGone
from router.http.job import Job
from router.openai.answers.wire_json import DONE, UsageField, frame

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_MANY = 256  # tokens with log-probabilities, from which an answer is laid out in a thread
_STUCK_S = 30.0  # beyond its deadline: for a client that neither reads nor hangs up


class GenerationResponse(Response):
    """Runs the job when called, and ends it however the call ends."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        status = "cancelled"
        watcher = asyncio.create_task(_watch(receive, job))
        try:
            async with asyncio.timeout(job.timeout_s + _STUCK_S):
                await job.start()
                await (self._stream(send) if job.stream else self._whole(send))
            status = "ok"
        except ClientGone:
            pass
        except TimeoutError:  # stuck in a send: leaving the response unfinished closes it
            status = "504"
        except ApiError as error:
            status = str(error.status)
            await self._show(error, scope, receive, send)
        except Exception as error:
            status = "500"
            log.error("request %s failed", job.id, exc_info=error)
            await self._show(failed("the router failed on this request"), scope, receive, send)
        finally:
            watcher.cancel()
            job.end(status)

    async def _whole(self, send: Send) -> None:
        job = self._job
        answers = await job.answers()
        given = (answers, job.usage(), job.explanation())
        if sum(len(answer.shown) + len(answer.prompt_logprobs) for answer in answers) > _MANY:
            body = await asyncio.to_thread(job.form.whole, *given)
        else:
            body = job.form.whole(*given)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._start(send, headers)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, send: Send) -> None:
        job = self._job
        left = len(job.choices)
        async with aclosing(merged([choice.deltas() for choice in job.choices])) as batches:
            async for batch in batches:
                left -= sum(delta.finish is not None for delta in batch)
                usage = self._usage_so_far()
                chunks = [c for delta in batch for c in job.form.chunks(delta, usage)]
                data = b"".join([frame(chunk) for chunk in chunks])
                if not left:
                    data += self._closing()
                if not data:
                    continue
                if not self._started:
                    await self._start(send, STREAM_HEADERS)
                await send({"type": "http.response.body", "body": data, "more_body": left > 0})

    def _usage_so_far(self) -> UsageField:
        job = self._job
        if job.continuous_usage:
            return job.usage()
        return None if job.include_usage else UNSET

    def _closing(self) -> bytes:
        job, data = self._job, b""
        if job.include_usage:
            data += frame(job.form.closing(job.usage()))
        if (told := job.explanation()) is not UNSET:
            blank = None if job.include_usage else UNSET
            data += frame(job.form.closing(blank, told))
        return data + DONE

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _show(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error.response()(scope, receive, send)
            return
        last: Message = {"type": "http.response.body", "body": frame(error.body())}
        await send({**last, "more_body": False})


async def _watch(receive: Receive, job: Job) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    job.abandon()
