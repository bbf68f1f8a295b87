"""Reads the server-sent events of one answer, as bytes come, and notes when tokens came."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.serve.records import Record

MAX_EVENT_BYTES = 4 << 20


class MalformedStream(Exception):
    """What came is no stream of an OpenAI server."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    def says(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Stream:
    """Feeds one record.

    With `return_token_ids` a chunk says how many tokens it has; else a chunk with any text counts
    as an arrival, and how many tokens there were in all comes from `usage`.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False  # [DONE] came
        self.finished = False  # a finish reason came
        self._rest = b""
        self._tokens = 0  # of the read at hand
        self._arrived = False

    def feed(self, data: bytes, now: float) -> None:
        """``now``: when it was read. Raises MalformedStream."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
        self._tokens, self._arrived = 0, False
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
        if self._arrived:
            self.record.times.append(now)
            if self._tokens:
                self.record.counts.append(self._tokens)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise MalformedStream(f"{e}: {data[:80]!r}") from None
        if chunk.error is not None:
            self.record.error = "error in the stream"
            self.record.message = said(msgspec.json.encode(chunk.error))
        for choice in chunk.choices:
            self._choice(choice)
        if chunk.usage is not None:
            self._usage(chunk.usage)

    def _choice(self, choice: _Choice) -> None:
        self.finished = self.finished or choice.finish_reason is not None
        if choice.token_ids:
            self._tokens += len(choice.token_ids)
        if choice.token_ids or choice.text or (choice.delta is not None and choice.delta.says()):
            self._arrived = True

    def _usage(self, usage: _Usage) -> None:
        self.record.prompt_counted = usage.prompt_tokens
        self.record.output_counted = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.record.cached = usage.prompt_tokens_details.cached_tokens


def said(body: bytes) -> str:
    """The message of an error as OpenAI writes it, with or without the object around it, or the
    body as it is: one line of at most 200 printable characters."""
    text = _message(body) or body.decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def _message(body: bytes) -> str | None:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    inner = found.get("error", found) if isinstance(found, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    return message if isinstance(message, str) else None
