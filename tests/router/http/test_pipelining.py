"""Several requests on one connection at once: a client that hangs up ends all of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.http import pipelining
from router.http.pipelining import MAX_PIPELINED
from tests.router.conftest import MODEL, Start, until
from tests.router.fake_worker import outputs, silent
from tests.router.raw_http import TYPED, get, post, wired


def generation(*, stream: bool, max_tokens: int = 2000) -> bytes:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": max_tokens, "stream": stream}
    return post(json.dumps(body).encode(), TYPED)


@contextmanager
def server_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Collect uvicorn's lines, too, which do not reach the root logger. Enter it when the server
    runs, because uvicorn removes the handlers that were there before."""
    logger = logging.getLogger("uvicorn.error")
    with caplog.at_level(logging.DEBUG, logger.name):
        logger.addHandler(caplog.handler)
        yield
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
async def test_hang_up_ends_pipelined_generations(
    start: Start, caplog: pytest.LogCaptureFixture, stream: bool, reset: bool
) -> None:
    cluster = await start(outputs(delay=0.01))
    worker = cluster.workers[0]
    async with wired(cluster) as connect:
        with server_log(caplog):
            wire = await connect(generation(stream=stream) * 2)
            await until(lambda: len(worker.requests) == 1)
            await asyncio.sleep(0.05)
            wire.writer.transport.abort() if reset else wire.writer.close()
            await until(lambda: len(worker.cancelled) == 1, timeout_s=1.0)
            await asyncio.sleep(0.05)
    assert len(worker.requests) == 1, "the second one has never begun"
    assert not cluster.app.state.router.admission.inside.total()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_hang_up_is_seen_while_a_large_body_waits(start: Start) -> None:
    cluster = await start(silent)
    worker = cluster.workers[0]
    async with wired(cluster) as connect:
        wire = await connect(generation(stream=True) + post(bytes(300_000), TYPED))
        await until(lambda: len(worker.requests) == 1)
        await asyncio.sleep(0.05)
        wire.writer.close()
        await until(lambda: len(worker.cancelled) == 1, timeout_s=1.0)


async def test_pipelined_requests_are_answered_in_order(start: Start) -> None:
    cluster = await start(outputs())
    async with wired(cluster) as connect:
        wire = await connect(generation(stream=False, max_tokens=2) + get(b"/health") + get(b"/no"))
        wire.send(generation(stream=False, max_tokens=1) + get(b"/ready"))
        replies = [await wire.reply() for _ in range(5)]
    assert [reply.status for reply in replies] == [200, 200, 404, 200, 200]
    lengths = [json.loads(replies[i].body)["usage"]["completion_tokens"] for i in (0, 3)]
    assert lengths == [2, 1]


async def test_only_so_many_requests_wait_on_a_connection(start: Start) -> None:
    """The others are ignored, and the connection closes after the last that was taken."""
    cluster = await start(outputs(delay=0.1))
    async with wired(cluster) as connect:
        wire = await connect(generation(stream=False, max_tokens=1) + get(b"/health") * 5000)
        wire.send(get(b"/health") * 1000)
        replies = [await wire.reply() for _ in range(MAX_PIPELINED)]
        assert [reply.status for reply in replies] == [200] * MAX_PIPELINED
        assert await wire.closed()


async def test_only_so_many_bytes_wait_on_a_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelining, "MAX_PIPELINED_BYTES", 10_000)
    cluster = await start(outputs(delay=0.1))
    async with wired(cluster) as connect:
        wire = await connect(generation(stream=False, max_tokens=1) + get(b"/health"))
        wire.send(post(bytes(20_000), TYPED) + get(b"/health"))
        assert [(await wire.reply()).status for _ in range(2)] == [200, 200]
        assert await wire.closed()


async def test_what_is_no_http_is_not_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start()
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n"
    async with wired(cluster) as connect:
        with server_log(caplog):
            for sent, status in ((b"hello\r\n\r\n", 400), (get(b"/health", upgrade), 200)):
                wire = await connect(sent)
                assert (await wire.reply()).status == status
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_error_is_not_written_into_an_earlier_response(start: Start) -> None:
    """Of three requests the first streams, the second waits with half a body, and then no HTTP
    follows."""
    cluster = await start(outputs(delay=0.01))
    chunked = post(b"", TYPED, b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    async with wired(cluster) as connect:
        wire = await connect(generation(stream=True) + chunked + b"3\r\nabc\r\n")
        assert (await wire.reply()).status == 200
        wire.send(b"no chunk\r\n")
        async with asyncio.timeout(5):
            rest = await wire.reader.read()
        assert b"invalid_http" not in rest and b"HTTP/1.1" not in rest
