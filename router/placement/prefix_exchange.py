"""Tells the other routers which prompts this one has sent to which workers, and listens to them.

    ledger --announce--> pending --one exchange at a time--> XADD baton:{cluster}:expected
    XREAD of the same stream ----------------------------> ``WorkLedger`` of each other router

Workers report their queues every few hundredths of a second at most. Without this, routers that
choose a worker meanwhile do not know of each other's prompts: with eight of them under load, a
tenth of the first tokens takes half as long again (``bench/router/many_routers.py``).

A prefix that a worker computes is in no cache event yet. Siblings that come to other routers
meanwhile would be computed again. An entry holds the keys of the blocks that are computed, and how
long that may take. It is a hint: if one is lost, a prefix is computed twice; if one is wrong, a
prediction is wrong; and nothing is remembered longer than MOST_S.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, cast

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from protocol.block_keys import BLOCK_TOKENS, KEY_BYTES
from protocol.kv_events import FIELD, split_keys
from protocol.registry.untrusted import decode_untrusted
from router.placement.expected_prefixes import (
    MOST_S,
    SAMPLE_BLOCKS,
    ExpectedPrefix,
    remembered_s,
)
from router.placement.ledger import WorkLedger

log = logging.getLogger(__name__)

BLOCK_MS = 250  # an XREAD waits this long for a new entry
DEADLINE_S = 3.0  # of every exchange with Redis
PAUSE_S = 1.0  # after an error
ENTRIES = 64  # in one XREAD, and prompts that wait to be sent; more are not announced
STREAM_ENTRIES = 256  # that Redis keeps
EXPIRE_MS = 30_000  # the stream outlives its last entry by this
MOST_KEYS = 4096  # of one prompt: 128k tokens
MOST_TOKENS = 1 << 21  # of one prompt, more than any context

_Reply = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]  # XREAD's: stream, (id, fields)
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class SentPrompt(msgspec.Struct, array_like=True, frozen=True):
    """An entry of the stream. ``keys``: of the blocks from ``first`` on, back to back."""

    router: _Name
    instance: _Name
    first: _Count
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]  # that the worker has to compute
    level: float
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]
    keys: Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES)]
    digest: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0  # 0: of a router that sends none

    @property
    def is_valid(self) -> bool:
        """Whether it has whole keys and no numbers that compare with nothing."""
        numbers = math.isfinite(self.level) and math.isfinite(self.seconds)
        return numbers and len(self.keys) % KEY_BYTES == 0


MOST_BYTES = MOST_KEYS * KEY_BYTES + 1024
_DECODER = msgspec.msgpack.Decoder(SentPrompt)


def sent_prompt(router: str, prefix: ExpectedPrefix, seconds: float, digest: int) -> SentPrompt:
    """Return what a router tells the others of a prompt that will be computed in about
    ``seconds``."""
    cached = len(prefix.keys) - 1 - prefix.tokens // BLOCK_TOKENS
    first = max(0, cached) // SAMPLE_BLOCKS * SAMPLE_BLOCKS
    # Nothing leads to a prompt whose prefix is on its way already.
    keys = b"".join(prefix.keys[first : first + MOST_KEYS]) if prefix.is_new else b""
    about = (router, prefix.instance, first, prefix.tokens, prefix.level)
    return SentPrompt(*about, remembered_s(seconds), keys, digest)


def take_sent(ledger: WorkLedger, sent: SentPrompt) -> None:
    """Enter what another router has sent."""
    keys, about = split_keys(sent.keys), (sent.tokens, sent.level, sent.first, sent.seconds)
    ledger.expected.add_of_other(sent.instance, keys, *about)
    if sent.digest:
        ledger.announce(sent.instance, sent.digest, sent.tokens)


class PrefixExchange:
    """One router's part: start -> announce ... -> close. ``others`` tells whether there are other
    routers; without them nothing is sent. Errors of Redis cost announcements and nothing else."""

    def __init__(
        self,
        client: redis.Redis,
        cluster: str,
        router: str,
        ledger: WorkLedger,
        others: Callable[[], bool],
    ) -> None:
        self._redis = client
        self._stream = f"baton:{cluster}:expected"
        self._router = router
        self._ledger = ledger
        self._others = others
        self._pending: list[bytes] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._last: bytes | str = "$"
        self._closing = False

    def start(self) -> None:
        for name, work in (("send", self._send), ("read", self._read)):
            self._tasks.append(asyncio.create_task(self._run(work), name=f"{name} prefixes"))

    async def close(self) -> None:
        """Stop; idempotent."""
        self._closing = True  # a client library may swallow a cancellation
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def announce(self, prefix: ExpectedPrefix, seconds: float, digest: int) -> None:
        """Tell the others of a prompt that will be computed in about ``seconds``."""
        if len(self._pending) >= ENTRIES or not self._others():
            return
        sent = sent_prompt(self._router, prefix, seconds, digest)
        self._pending.append(msgspec.msgpack.encode(sent))
        self._wake.set()

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        failed = False
        while not self._closing:
            try:
                await work()
                failed = False
            except Exception as error:  # the next exchange may work
                # What is old by then counts in the loads of workers.
                self._pending, self._last = [], "$"
                if not failed:
                    known = isinstance(error, (RedisError, OSError, TimeoutError))
                    told = "what routers have sent cannot be exchanged: %r"
                    log.warning(told, error, exc_info=not known)
                failed = True
                await asyncio.sleep(PAUSE_S)

    async def _send(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        entries, self._pending = self._pending, []
        async with asyncio.timeout(DEADLINE_S), self._redis.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.xadd(self._stream, {FIELD: entry}, maxlen=STREAM_ENTRIES)
            pipe.pexpire(self._stream, EXPIRE_MS)
            await pipe.execute()

    async def _read(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            reply = await self._redis.xread(
                {self._stream: self._last}, count=ENTRIES, block=BLOCK_MS
            )
        if not reply:  # whatever ids there were, also in a Redis of before
            self._last = "$"
        for _, entries in cast("_Reply", reply):
            for sent in self._decoded(entries):
                take_sent(self._ledger, sent)

    def _decoded(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[SentPrompt]:
        """Yield what other routers have sent; what is in Redis may be garbage."""
        for entry_id, fields in entries:
            self._last = entry_id
            sent = decode_untrusted(_DECODER, fields.get(FIELD), MOST_BYTES)
            if sent is not None and sent.router != self._router and sent.is_valid:
                yield sent
