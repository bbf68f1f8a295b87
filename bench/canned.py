"""A server of the OpenAI API that computes nothing: it streams what it was told to, when it was
told to. For load generators: what they say must be what it did, and it costs next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import msgspec

Fault = Literal["", "500", "hang-up", "half", "silence", "malformed", "error", "cut"]
MODEL = "canned"
LINE_LIMIT = 1 << 24
BACKLOG = 4096
"""A connection that finds it full may hang for minutes."""
_TEXT = "a word "


class Manner(NamedTuple):
    """How requests are answered. Seconds; ``together``: tokens in a chunk. ``refused``: fields that
    are answered with 400, ``ids`` False: prompts of token ids, too. ``faults``: of the requests
    for more than 2 tokens, in turn."""

    first_s: float = 0.0
    gap_s: float = 0.0
    together: int = 1
    refused: tuple[str, ...] = ()
    ids: bool = True
    faults: tuple[Fault, ...] = ("",)


class Canned:
    """``bodies``: what was asked for, in order."""

    def __init__(self, manner: Manner) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._manner = manner
        self._turn = 0

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Its URL."""
        server = await asyncio.start_server(
            self._connection, "127.0.0.1", port, limit=LINE_LIMIT, backlog=BACKLOG
        )
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            _whole(writer, 200, {"object": "list", "data": [{"id": MODEL}]})
            return True
        length = int(head.split("content-length:")[1].split()[0])
        body = msgspec.json.decode(await reader.readexactly(length))
        self.bodies.append(body)
        wrong = [f for f in self._manner.refused if f in body]
        if wrong or (not self._manner.ids and isinstance(body.get("prompt"), list)):
            message = f"{', '.join(wrong) or 'token ids'}: not known here"
            _whole(writer, 400, {"error": {"message": message}})
            return True
        return await self._answer(writer, body, "chat" in head.splitlines()[0])

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> bool:
        fault: Fault = ""
        if body["max_tokens"] > 2:  # no probe
            fault = self._manner.faults[self._turn % len(self._manner.faults)]
            self._turn += 1
        if fault == "500":
            _whole(writer, 500, {"error": {"message": "out of [red]luck[/]"}})
            return True
        if fault == "silence":
            await asyncio.sleep(3600)
        if fault != "hang-up":
            await self._stream(writer, body, chat, fault)
        return fault in ("", "error", "cut")  # which end as HTTP wants it

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool, fault: Fault
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n")
        writer.write(b"Content-Type: text/event-stream\r\n\r\n")
        left = body["max_tokens"]
        await _sleep(self._manner.first_s)
        while left:
            count = min(left, self._manner.together)
            left -= count
            writer.write(_chunk(_event(body, chat, count, last=not left)))
            if fault:
                writer.write(_fault(fault))
                return
            await writer.drain()
            if left:
                await _sleep(self._manner.gap_s)
        if body.get("stream_options"):
            writer.write(_chunk(_usage(body)))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


async def _sleep(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


def _whole(writer: asyncio.StreamWriter, status: int, answer: object) -> None:
    data = msgspec.json.encode(answer)
    writer.write(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _sse(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _event(body: dict[str, Any], chat: bool, count: int, last: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    choice |= {"delta": {"content": _TEXT * count}} if chat else {"text": _TEXT * count}
    if body.get("return_token_ids"):
        choice["token_ids"] = [7] * count
    return _sse({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


def _usage(body: dict[str, Any]) -> bytes:
    prompt = body.get("prompt") or body["messages"][0]["content"]
    size = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    details = {"cached_tokens": size // 2}
    usage = {"prompt_tokens": size, "completion_tokens": body["max_tokens"]}
    return _sse({"choices": [], "usage": usage | {"prompt_tokens_details": details}})


def _fault(fault: Fault) -> bytes:
    """What a stream says after its first tokens; the connection ends then."""
    if fault == "malformed":
        return _chunk(b"data: {this is no JSON\n\n")
    if fault == "error":
        return _chunk(b'data: {"error": {"message": "the engine died"}}\n\n') + b"0\r\n\r\n"
    return b"0\r\n\r\n" if fault == "cut" else b""
