"""Redis as the directory of workers uses it: in memory, with latency and faults.

    up        commands take about a millisecond
    down      commands raise ConnectionError
    full      writes are answered with OOM, reads work, leases run out
    frozen    commands are answered when it goes on; the client gives up before

``lapse`` lets all leases run out at once, as after a restart without persistence.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.simulation.fakes.virtual_loop import VirtualLoop

TIMEOUT_S = 2.0
WRITES = {"set", "sadd"}
"""Commands that a full server refuses, of those that are used (``denyoom`` in its COMMAND INFO)."""


class FakeRedis:
    """One server, and the client that all processes share."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop, self._rng = loop, rng
        self.state = "up"
        self._values: dict[bytes, tuple[bytes, float]] = {}
        self._sets: dict[bytes, set[bytes]] = {}

    def lapse(self) -> None:
        self._values.clear()

    # ---- the client -------------------------------------------------------------------------

    def pipeline(self, transaction: bool = True) -> _Pipeline:
        return _Pipeline(self)

    async def wait(self) -> None:
        if self.state == "frozen":
            await asyncio.sleep(TIMEOUT_S)
            raise RedisTimeoutError("timed out")
        await asyncio.sleep(self._rng.uniform(0.0002, 0.002))
        if self.state == "down":
            raise RedisConnectionError("connection refused")

    async def _run(self, name: str, *args: Any, **options: Any) -> Any:
        await self.wait()
        reply = self.apply(name, args, options)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def command(*args: Any, **options: Any) -> Any:
            return self._run(name, *args, **options)

        return command

    # ---- the server -------------------------------------------------------------------------

    def apply(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name in WRITES and self.state == "full":
            return ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
        return getattr(self, f"_{name}")(*args, **options)

    def _set(self, key: Any, value: bytes, px: int = 0, ex: int = 0) -> bool:
        ttl = px / 1000 or ex or 1e9
        self._values[_key(key)] = value, self._loop.now + ttl
        return True

    def _pexpire(self, key: Any, milliseconds: int) -> int:
        value = self._get(key)
        if value is None:
            return 0
        self._values[_key(key)] = value, self._loop.now + milliseconds / 1000
        return 1

    def _get(self, key: Any) -> bytes | None:
        value, until = self._values.get(_key(key), (b"", -1.0))
        return value if until > self._loop.now else None

    def _mget(self, keys: list[Any]) -> list[bytes | None]:
        return [self._get(key) for key in keys]

    def _delete(self, *keys: Any) -> int:
        return sum(self._values.pop(_key(key), None) is not None for key in keys)

    _unlink = _delete

    def _sadd(self, key: Any, *members: Any) -> int:
        self._sets.setdefault(_key(key), set()).update(_key(m) for m in members)
        return len(members)

    def _srem(self, key: Any, *members: Any) -> int:
        self._sets.get(_key(key), set()).difference_update(_key(m) for m in members)
        return len(members)

    def _smembers(self, key: Any) -> set[bytes]:
        return set(self._sets.get(_key(key), ()))

    def _srandmember(self, key: Any, number: int) -> list[bytes]:
        return sorted(self._sets.get(_key(key), ()))[:number]

    def _scard(self, key: Any) -> int:
        return len(self._sets.get(_key(key), ()))

    def _sscan(self, key: Any, cursor: int = 0, match: Any = None, count: int = 0) -> Any:
        return 0, sorted(self._sets.get(_key(key), ()))

    def _strlen(self, key: Any) -> int:
        return len(self._get(key) or b"")

    def _memory_usage(self, key: Any, **_: Any) -> int | None:
        name = _key(key)
        if name in self._sets:
            return 64 + sum(80 + len(member) for member in self._sets[name])
        value = self._get(name)
        return None if value is None else 64 + len(value)

    def _getrange(self, key: Any, start: int, end: int) -> bytes:
        value = self._get(key) or b""
        return value[start:] if end < 0 else value[start : end + 1]


class _Pipeline:
    def __init__(self, server: FakeRedis) -> None:
        self._server = server
        self._commands: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        def queue(*args: Any, **options: Any) -> _Pipeline:
            self._commands.append((name, args, options))
            return self

        return queue

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        await self._server.wait()
        replies = [self._server.apply(*command) for command in self._commands]
        error = next((r for r in replies if isinstance(r, Exception)), None)
        if raise_on_error and error is not None:
            raise error
        return replies


def _key(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
