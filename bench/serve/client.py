"""Sends one request and reads its answer; whatever goes wrong becomes part of its record."""

from __future__ import annotations

import os
import ssl
import time

import aiohttp
import msgspec

from bench.serve.options import Options
from bench.serve.records import Record
from bench.serve.stream import MalformedStream, Stream, said
from protocol.errors import StartupError

KEEP_ALIVE_S = 2.0
"""Well below servers' own: a connection that one is just closing would fail a request."""
MAX_ERROR_BYTES = 1 << 16


class Clock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self.began


def base_url(url: str) -> str:
    """Without the slash at the end, and without /v1."""
    return url.rstrip("/").removesuffix("/v1")


def session(options: Options) -> aiohttp.ClientSession:
    """Raises StartupError when the key or the certificates are not where they should be."""
    headers = {"content-type": "application/json"}
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env, "")
        if not key:
            raise StartupError(f"--api-key-env: the variable {options.api_key_env} is not set")
        headers["authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=_verify(options.ca_file)
        ),
        timeout=aiohttp.ClientTimeout(
            total=options.timeout_s, sock_connect=options.connect_timeout_s
        ),
        headers=headers,
        skip_auto_headers=("user-agent", "accept-encoding"),
    )


def _verify(ca_file: str | None) -> ssl.SSLContext | bool:
    try:
        return True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as e:
        raise StartupError(f"--ca-file: {ca_file} cannot be read: {e}") from None


async def send(
    http: aiohttp.ClientSession, url: str, body: bytes, record: Record, clock: Clock
) -> None:
    """Never raises for what the server does. When cancelled, the record says so."""
    record.error, record.sent = "interrupted", clock()
    try:
        await _exchange(http, url, body, record, clock)
    except TimeoutError:  # aiohttp's are of both families
        record.error = "timeout"
    except aiohttp.ClientConnectorError as e:
        record.error, record.message = "no connection", said(str(e).encode())
    except (aiohttp.ClientError, OSError) as e:
        record.error, record.message = "hung up", said(str(e).encode())
    except MalformedStream as e:
        record.error, record.message = "malformed stream", said(str(e).encode())
    finally:
        record.ended = clock()


async def _exchange(
    http: aiohttp.ClientSession, url: str, body: bytes, record: Record, clock: Clock
) -> None:
    async with http.post(url, data=body, allow_redirects=False) as response:
        record.status = response.status
        if response.status != 200:
            answer = await response.content.read(MAX_ERROR_BYTES)
            record.error, record.message = f"HTTP {response.status}", said(answer)
            return
        stream = Stream(record)
        async for data in response.content.iter_any():
            stream.feed(data, clock())
        record.error = _verdict(stream)


def _verdict(stream: Stream) -> str:
    if stream.record.error == "error in the stream":
        return stream.record.error
    if not (stream.done or stream.finished):
        return "cut short"
    return "" if stream.record.times else "no token"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(http: aiohttp.ClientSession, url: str) -> str:
    """The id of the first model that is served. Raises StartupError."""
    where = f"{url}/v1/models"
    try:
        async with http.get(where, timeout=aiohttp.ClientTimeout(total=30)) as response:
            answer = await response.read()
            if response.status != 200:
                hint = " (--api-key-env names a variable with one)" * (response.status == 401)
                raise StartupError(f"{where}: HTTP {response.status}: {said(answer)}{hint}")
            return msgspec.json.decode(answer, type=_Models).data[0].id
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        raise StartupError(f"{where}: no answer: {e or type(e).__name__}") from None
    except (msgspec.MsgspecError, IndexError):
        raise StartupError(f"{where}: expected a list of models; name one with --model") from None
