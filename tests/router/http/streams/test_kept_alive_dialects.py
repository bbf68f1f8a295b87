"""Each dialect keeps a silent stream alive in its own form, before the first token and after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import httpx
import pytest

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Start, served, until

EVERY_S = 0.05
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def is_comment(event: str) -> bool:
    return event == ": keep-alive"


def is_ping(event: str) -> bool:
    return event == 'event: ping\ndata: {"type":"ping"}'


def is_state(event: str) -> bool:
    """A state of the response that comes again: its numbers go on."""
    return event.startswith("event: response.in_progress\n")


class DialectCase(NamedTuple):
    """One endpoint: its body, its keep-alive, and whether an event comes before the first token."""

    path: str
    body: dict[str, object]
    is_keep_alive: Callable[[str], bool]
    opens: bool = False


CASES = (
    DialectCase("/v1/completions", {"prompt": "hi", "max_tokens": 2}, is_comment),
    DialectCase("/v1/chat/completions", CHAT, is_comment),
    DialectCase("/v1/messages", CHAT, is_ping),
    DialectCase("/v1/responses", {"input": "hi", "max_output_tokens": 2}, is_state, opens=True),
)


class StepWorker:
    """A fake worker's script: each token waits for a permission."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def __call__(self, request: pb.Request) -> AsyncIterator[pb.Output]:
        for last in (False, True):
            await self.permits.acquire()
            finish = pb.FINISH_LENGTH if last else pb.FINISH_NONE
            yield pb.Output(id=request.id, tokens=[70], finish=finish)


class SlowReader:
    """Reads events of a stream as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.events: list[str] = []
        self._task = asyncio.create_task(self._read(response))

    async def _read(self, response: httpx.Response) -> None:
        rest = ""
        async for text in response.aiter_text():
            *whole, rest = (rest + text).split("\n\n")
            self.events += whole
        assert rest == ""

    async def end(self) -> None:
        async with asyncio.timeout(10):
            await self._task


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
async def test_keep_alives_come_in_the_form_of_the_dialect(start: Start, case: DialectCase) -> None:
    worker = StepWorker()
    cluster = await start(worker, keep_alive_s=EVERY_S)
    body = {"model": MODEL, "stream": True, **case.body}
    async with (
        served(cluster.app) as url,
        httpx.AsyncClient() as client,
        client.stream("POST", url + case.path, json=body) as response,
    ):
        reader = SlowReader(response)
        for _ in range(2):
            seen = len(reader.events)

            def kept(seen: int = seen) -> list[bool]:
                return [case.is_keep_alive(event) for event in reader.events[seen:]]

            await until(lambda: sum(kept()) >= 3)
            worker.permits.release()
            count = sum(kept())
            await until(lambda: len(kept()) > count and not kept()[-1])  # noqa: B023
        await reader.end()
    meaning = [event for event in reader.events if not case.is_keep_alive(event)]
    assert response.status_code == 200 and len(meaning) >= 2
    if case.path == "/v1/responses":
        sent = [json.loads(event.partition("data: ")[2]) for event in reader.events]
        assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
        assert sent[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
async def test_the_head_of_a_silent_stream_comes_without_a_token(
    start: Start, case: DialectCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.streams.event_sender.HEAD_DELAY_S", EVERY_S)
    worker = StepWorker()
    cluster = await start(worker, keep_alive_s=300.0)
    body = {"model": MODEL, "stream": True, **case.body}
    async with (
        served(cluster.app) as url,
        httpx.AsyncClient() as client,
        client.stream("POST", url + case.path, json=body) as response,
    ):
        assert response.status_code == 200  # while the worker has sent nothing
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        for _ in range(2):
            worker.permits.release()
        text = (await response.aread()).decode()
    assert not case.is_keep_alive(text.split("\n\n")[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
async def test_silence_ends_the_stream_in_the_form_of_the_dialect(
    start: Start, case: DialectCase
) -> None:
    worker = StepWorker()
    cluster = await start(worker, keep_alive_s=EVERY_S, next_token_timeout_s=0.3)
    worker.permits.release()
    body = {"model": MODEL, "stream": True, **case.body}
    reply = await cluster.client.post(case.path, json=body)
    *before, last = reply.text.rstrip("\n").split("\n\n")
    assert reply.status_code == 200
    assert "no further token was generated within 0.3 s" in last and "[DONE]" not in last
    assert any(map(case.is_keep_alive, before)), "keep-alives are no progress"
    await until(lambda: len(cluster.workers[0].cancelled) == 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
async def test_an_error_before_the_head_keeps_its_status(start: Start, case: DialectCase) -> None:
    cluster = await start(StepWorker(), first_token_timeout_s=0.1)
    reply = await cluster.client.post(case.path, json={"model": MODEL, "stream": True, **case.body})
    assert reply.status_code == (200 if case.opens else 504)
    assert "the first token was not generated within 0.1 s" in reply.text
