"""What HTTP itself can bring: bytes on a socket, to a router as `baton router` runs it."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.http.limits import MAX_HEAD, MAX_HEADERS, MAX_TARGET
from tests.router.conftest import MODEL, Start, until
from tests.router.fake_worker import outputs
from tests.router.raw_http import JSON, POST, TYPED, get, post, wired

GOOD = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1}).encode()


LARGE = b"x: %s\r\n"

CASES: list[tuple[bytes, int, str | None, str]] = [
    (get(b"/" + b"x" * MAX_TARGET), 414, "uri_too_long", "at most 8192"),
    (get(b"/health?" + b"x" * MAX_TARGET), 414, "uri_too_long", "URL is too large"),
    (get(b"/health", LARGE % (b"x" * MAX_HEADERS)), 431, "headers_too_large", "at most 32768"),
    (get(b"/health", LARGE % b"" * 7000), 431, "headers_too_large", "headers are too large"),
    (get(b"/health", LARGE % (b"x" * 2 * MAX_HEAD)), 431, "headers_too_large", "too large"),
    (get(b"/health", b"x" * 2 * MAX_HEAD), 431, "headers_too_large", "too large"),
    (get(b"/nothing"), 404, "not_found", "GET /nothing: there is no such path"),
    (get(b"/health/"), 404, "not_found", "/health/"),
    (get(b"/a%0d%0ax-evil:%201"), 404, "not_found", "no such path"),
    (get(b"/v1/models/" + b"x" * 3000), 404, "model_not_found", "does not exist"),
    (get(b"/v1/completions"), 405, "method_not_allowed", "accepts only POST"),
    (get(b"/v1/models", method=b"DELETE"), 405, "method_not_allowed", "accepts only GET, HEAD"),
    (get(b"/v1/models", method=b"OPTIONS"), 405, "method_not_allowed", "accepts only GET, HEAD"),
    (get(b"/v1/chat/completions", method=b"PUT"), 405, "method_not_allowed", "accepts only POST"),
    (get(b"/health", b"upgrade: websocket\r\nconnection: upgrade\r\n", method=b"POST"), 405,
     "method_not_allowed", "GET, HEAD"),
    (b"hello\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99), 400, "invalid_http", "HTTP/1.1"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
    (get(b"*", method=b"OPTIONS"), 404, "not_found", "OPTIONS *: there is no such path"),
    (get(b"x:1", method=b"CONNECT"), 400, "invalid_http", "HTTP/1.1"),
    (get(b"/caf\xe9"), 400, "invalid_http", "HTTP/1.1"),
    (get(b"/health", b"no colon\r\n"), 400, "invalid_http", "HTTP/1.1"),
    (get(b"/health", b"a: b\rc\r\n"), 400, "invalid_http", "HTTP/1.1"),
    (POST + b"content-length: x\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
    (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab", 400, "invalid_http", "HTTP/1.1"),
    (POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400,
     "invalid_http", "HTTP/1.1"),
    (POST + JSON + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http", "HTTP/1.1"),
    (POST + JSON + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"y" * 8 * MAX_HEAD, 431,
     "headers_too_large", "too large"),
    (post(GOOD), 415, "unsupported_media_type", "there is none"),
    (post(GOOD, b"content-type: text/plain"), 415, "unsupported_media_type", "'text/plain'"),
    (post(GOOD, b"content-type: multipart/form-data; boundary=x"), 415, "unsupported_media_type",
     "expected content-type application/json"),
    (post(GOOD, b"content-type: application/json; charset=latin-1"), 415, "unsupported_media_type",
     "charset of JSON must be utf-8"),
    (post(b"x", TYPED, b"content-encoding: gzip"), 415, "unsupported_media_type", "'gzip'"),
    (post(b"x", TYPED, b"content-encoding: zstd"), 415, "unsupported_media_type", "'zstd'"),
    (post(b"", TYPED), 400, "invalid_json", "the body is empty"),
    (post(b"x" * 70_000, TYPED), 413, "request_too_large", "at most 65536 bytes"),
    (POST + JSON + b"transfer-encoding: chunked\r\n\r\n"
     + (b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 5 + b"0\r\n\r\n",
     413, "request_too_large", "at most 65536 bytes"),
    (post(GOOD, TYPED, b"x-baton-ttft-deadline-ms: soon"), 400, None, "milliseconds above 0"),
    (post(GOOD, TYPED, b"x-baton-ttft-deadline-ms: nan"), 400, None, "milliseconds above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "status", "code", "says"), CASES)
async def test_refusals(
    start: Start, sent: bytes, status: int, code: str | None, says: str
) -> None:
    cluster = await start(outputs(), max_body_bytes=2**16)
    async with wired(cluster) as connect:
        wire = await connect(sent)
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (status, code)
        assert reply.error["type"] == "invalid_request_error"
        assert says in reply.error["message"]
        if status in (413, 414, 431) or code == "invalid_http":
            assert reply.headers["connection"] == "close"
            assert await wire.closed()
        else:
            wire.send(get(b"/health"))  # the connection is good for more
            assert (await wire.reply()).status == 200
        if status == 405:
            assert reply.headers["allow"] in ("POST", "GET, HEAD")
    assert not cluster.workers[0].requests


async def test_good_requests_on_one_connection(start: Start) -> None:
    cluster = await start(outputs())
    async with wired(cluster) as connect:
        wire = await connect()
        for lines in ([TYPED], [b"Content-Type: Application/JSON; charset=\"UTF-8\""],
                      [TYPED, b"content-encoding: identity"]):  # fmt: skip
            wire.send(post(GOOD, *lines))
            assert (await wire.reply()).status == 200
        pieces = [b"%x\r\n%s\r\n" % (1, GOOD[i : i + 1]) for i in range(len(GOOD))]
        wire.send(POST + JSON + b"transfer-encoding: chunked\r\n\r\n")
        wire.send(b"".join([*pieces, b"0\r\n\r\n"]))
        assert (await wire.reply()).status == 200
        wire.send(get(b"/health", method=b"HEAD"))
        reply = await wire.reply(head_only=True)
        assert (reply.status, reply.headers["content-length"]) == (200, "15")
        wire.send(get(b"/health", LARGE % (b"x" * (MAX_HEADERS - 100))) * 2)  # one after another
        assert [(await wire.reply()).status for _ in range(2)] == [200, 200]


async def test_a_body_that_is_announced(start: Start) -> None:
    cluster = await start(outputs(), max_body_bytes=1000)
    async with wired(cluster) as connect:
        wire = await connect(POST + JSON + b"expect: 100-continue\r\ncontent-length: 9999\r\n\r\n")
        assert (await wire.reply()).status == 413, "before it is sent"
        assert await wire.closed()
        length = b"content-length: %d\r\n\r\n" % len(GOOD)
        wire = await connect(POST + JSON + b"expect: 100-continue\r\n" + length)
        assert (await wire.reply()).status == 100
        wire.send(GOOD)
        assert (await wire.reply()).status == 200


async def test_a_body_that_is_slow(start: Start) -> None:
    cluster = await start(outputs(), body_timeout_s=0.3)
    async with wired(cluster) as connect:
        for lines in (b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{"):
            wire = await connect(POST + JSON + lines)
            reply = await wire.reply()
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
            assert reply.error["message"] == "the body was not received within 0.3 s"
            assert await wire.closed()
    page = cluster.app.state.router.metrics_page().decode()
    assert 'baton_requests_total{model="tiny",role="router",status="408"} 2.0' in page


async def test_headers_that_are_slow(start: Start) -> None:
    cluster = await start(outputs(delay=0.1))
    async with wired(cluster, head_timeout_s=0.3) as connect:
        wire = await connect(POST)
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert await wire.closed()
        silent = await connect()
        assert await silent.closed()
        body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 6}).encode()
        wire = await connect(post(body, TYPED))
        assert (await wire.reply()).status == 200, "an answer may take longer"
        wire.send(POST)
        assert (await wire.reply()).status == 408, "of the second request, too"


async def test_a_client_that_never_ends_its_large_body(start: Start) -> None:
    """What is thrown away is bounded."""
    cluster = await start(outputs(), max_body_bytes=2**16)
    async with wired(cluster) as connect:
        wire = await connect(POST + JSON + b"content-length: 999999999\r\n\r\n")
        sent = 0
        while not wire.writer.is_closing() and sent < 20 * 2**20:
            wire.send(bytes(2**16))
            sent += 2**16
            await asyncio.sleep(0)
            if not wire.reader.at_eof() and wire.reader._buffer:
                break
        assert (await wire.reply()).status == 413
        assert sent < 4 * 2**20


@pytest.mark.parametrize(
    "given",
    [b"a\tb", b"caf\xe9", "é".encode(), b"x" * 129, b"a b", b"<script>", b"", b"a;b", b"a\x00b"],
)
async def test_request_ids_that_never_come_back(start: Start, given: bytes) -> None:
    cluster = await start()
    async with wired(cluster) as connect:
        wire = await connect(get(b"/health", b"x-request-id: %s\r\n" % given))
        reply = await wire.reply()
        if b"\x00" in given:
            assert reply.error["code"] == "invalid_http"
        else:
            assert len(reply.headers["x-request-id"]) == 32


async def test_a_line_break_in_a_request_id_is_no_part_of_it(start: Start) -> None:
    cluster = await start()
    async with wired(cluster) as connect:
        wire = await connect(get(b"/health", b"x-request-id: a%0d%0ab\r\nx-evil: 1\r\n"))
        reply = await wire.reply()
        assert "x-evil" not in reply.headers and len(reply.headers["x-request-id"]) == 32
        wire = await connect(get(b"/health", b"x-request-id: a\r\n b: 1\r\n"))  # folded
        assert "\n" not in str((await wire.reply()).headers)


async def test_a_stream_goes_on_when_the_next_request_is_not_one(start: Start) -> None:
    """Its connection is lost, but nothing is written into its answer."""
    cluster = await start(outputs(delay=0.02))
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 99, "stream": True}).encode()
    async with wired(cluster) as connect:
        wire = await connect(post(body, TYPED))
        assert (await wire.reply()).status == 200
        wire.send(b"no request\r\n\r\n")
        async with asyncio.timeout(10):
            rest = await wire.reader.read()
        assert b"invalid_http" not in rest
    await until(lambda: len(cluster.workers[0].cancelled) == 1)
