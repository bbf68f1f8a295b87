"""The response to a completion request: whole, or streamed as server-sent events.

Nothing is sent before the first text, so that an error before it has its HTTP status. After it, an
error is a frame of its own and the stream ends without ``[DONE]``: never silently short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Message, Receive, Scope, Send

from router.body import ClientGone
from router.errors import ApiError, failed
from router.explain import Explanation, explain
from router.generate import Generation
from router.metrics import Meter
from router.policies import PolicyName
from router.snapshot import Objectives
from router.text import TextStream
from router.wire_json import DONE, REASONS, Choice, Completion, FinishReason, Usage, encode, frame

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_STUCK_S = 30.0  # beyond its deadline: for a client that neither reads nor hangs up


class Job(NamedTuple):
    """A request that has been checked, and all that answering it takes."""

    id: str
    created: int
    model: str
    prompt: tuple[int, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    explain: bool
    goals: Objectives
    policy: PolicyName
    timeout_s: float
    generation: Generation
    text: TextStream
    meter: Meter


class Delta(NamedTuple):
    text: str
    ids: list[int]
    finish: FinishReason | None


class CompletionResponse(Response):
    """Runs the job when called, and ends it however the call ends."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._used = 0
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        status = "cancelled"
        watcher = asyncio.create_task(_watch(receive, job.generation))
        try:
            job.generation.start()
            async with asyncio.timeout(job.timeout_s + _STUCK_S):
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
            job.generation.close()
            generation = job.generation
            job.meter.ended(
                *(status, len(job.prompt), generation.cached_tokens, generation.attempts)
            )

    async def _deltas(self) -> AsyncIterator[Delta]:
        """Text as it comes; the last one has a finish reason."""
        job = self._job
        while True:
            tokens = await job.generation.next()
            piece = job.text.push(tokens.ids)
            ids, text, stopped = tokens.ids[: piece.used], piece.text, piece.stopped
            job.meter.tokens(len(ids))
            self._used += len(ids)
            if stopped:
                job.generation.close()  # the worker would go on
            elif tokens.finish:
                tail = job.text.flush()
                text, stopped = text + tail.text, tail.stopped
            finish = "stop" if stopped else REASONS.get(tokens.finish)
            yield Delta(text, ids, finish)
            if finish:
                return

    async def _whole(self, send: Send) -> None:
        texts: list[str] = []
        ids: list[int] = []
        finish: FinishReason | None = None
        async for delta in self._deltas():
            texts.append(delta.text)
            ids += delta.ids
            finish = delta.finish
        choice = self._choice(Delta("".join(texts), ids, finish), first=True)
        body = encode(self._completion([choice], self._usage(), self._explanation()))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._start(send, headers)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, send: Send) -> None:
        include_usage = self._job.include_usage
        async for delta in self._deltas():
            if not (delta.text or delta.finish or self._job.return_token_ids):
                continue
            choice = self._choice(delta, first=not self._started)
            data = frame(encode(self._completion([choice], None if include_usage else UNSET)))
            if delta.finish:
                if include_usage:
                    data += frame(encode(self._completion([], self._usage())))
                if self._job.explain:
                    blank = None if include_usage else UNSET
                    data += frame(encode(self._completion([], blank, self._explanation())))
                data += DONE
            if not self._started:
                await self._start(send, STREAM_HEADERS)
            await send({"type": "http.response.body", "body": data, "more_body": not delta.finish})

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _show(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error.response()(scope, receive, send)
            return
        last: Message = {"type": "http.response.body", "body": frame(error.body())}
        await send({**last, "more_body": False})

    def _choice(self, delta: Delta, *, first: bool) -> Choice:
        if not self._job.return_token_ids:
            return Choice(text=delta.text, finish_reason=delta.finish)
        return Choice(
            text=delta.text,
            finish_reason=delta.finish,
            token_ids=delta.ids,
            prompt_token_ids=self._job.prompt if first else UNSET,
        )

    def _explanation(self) -> Explanation | UnsetType:
        job = self._job
        if not job.explain:
            return UNSET
        return explain(job.policy, job.goals, job.generation.attempts)

    def _completion(
        self,
        choices: list[Choice],
        usage: Usage | UnsetType | None,
        explanation: Explanation | UnsetType = UNSET,
    ) -> Completion:
        job = self._job
        return Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=usage,
            baton=explanation,
        )

    def _usage(self) -> Usage:
        job = self._job
        return Usage.of(len(job.prompt), self._used, job.generation.cached_tokens)


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abandon()
