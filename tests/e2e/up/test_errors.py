"""HTTP's own mistakes, at a router under `baton up`."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from bench.lib.local_cluster import LocalCluster
from router.http.limits import MAX_HEADERS, MAX_TARGET
from tests.router.raw_http import JSON, POST, TYPED, Reply, Wire, get, post

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(240)]

LARGE = 8 * 2**20 + 1
CHUNKED = JSON + b"transfer-encoding: chunked\r\n\r\n"
GOOD = json.dumps({"model": "baton-demo", "prompt": "x", "max_tokens": 1}).encode()

CASES: list[tuple[bytes, int, str]] = [
    (get(b"/" + b"x" * MAX_TARGET), 414, "uri_too_long"),
    (get(b"/health", b"x: %s\r\n" % (b"x" * MAX_HEADERS)), 431, "headers_too_large"),
    (get(b"/health", b"x: 123456\r\n" * 3100), 431, "headers_too_large"),
    (get(b"/nothing"), 404, "not_found"),
    (get(b"/v1/completions"), 405, "method_not_allowed"),
    (post(GOOD), 415, "unsupported_media_type"),
    (post(GOOD, TYPED, b"content-encoding: gzip"), 415, "unsupported_media_type"),
    (post(b"{", TYPED), 400, "invalid_json"),
    (post(b"x" * LARGE, TYPED), 413, "request_too_large"),
    (POST + CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (LARGE, b"x" * LARGE), 413, "request_too_large"),
    (post(GOOD.replace(b"baton-demo", b"other"), TYPED), 404, "model_not_found"),
]


async def ask(cluster: LocalCluster, sent: bytes) -> Reply:
    where = urlsplit(cluster.url)
    wire = Wire(*await asyncio.open_connection(where.hostname, where.port))
    try:
        wire.send(sent)
        return await wire.reply()
    finally:
        wire.writer.close()


@pytest.mark.parametrize(("sent", "status", "code"), CASES)
async def test_refusals(cluster: LocalCluster, sent: bytes, status: int, code: str) -> None:
    reply = await ask(cluster, sent)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert len(reply.headers["x-request-id"]) > 20


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", get(b"/health", b"no colon\r\n")])
async def test_what_is_not_http(cluster: LocalCluster, sent: bytes) -> None:
    reply = await ask(cluster, sent)
    assert (reply.status, reply.error["code"]) == (400, "invalid_http")
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("given", [b"caf\xe9", "é".encode(), b"x" * 129, b"a b", b"a;b", b"a,b"])
async def test_request_ids_that_never_come_back(cluster: LocalCluster, given: bytes) -> None:
    reply = await ask(cluster, get(b"/health", b"x-request-id: %s\r\n" % given))
    assert reply.status == 200
    assert len(reply.headers["x-request-id"]) == 32


async def test_a_good_request_id_comes_back(cluster: LocalCluster) -> None:
    reply = await ask(cluster, get(b"/health", b"x-request-id: my-id\r\n"))
    assert reply.headers["x-request-id"] == "my-id"
