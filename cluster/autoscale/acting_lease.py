"""Elects the acting autoscaler: of all autoscalers of a cluster, the one that holds a key in Redis.

    baton:{cluster}:autoscaler:acting    a random value of the holder, for ttl_s at most

The key is taken by SET NX, and kept and released only by the process that wrote the value. A holder
that cannot reach Redis treats the lease as lost, because another one may have it by now. What is at
the key and is no lease ends like one: a value that would not expire soon gets ttl_s, and anything
but a string is deleted.
"""

from __future__ import annotations

import secrets

import redis.asyncio as redis
from redis.exceptions import RedisError

from protocol.errors import Unavailable

_LONGEST_MS = 3_600_000
"""No autoscaler takes the lease for longer; other ones may have longer turns than this one."""

_KEEP = """
if redis.call('TYPE', KEYS[1]).ok ~= 'string' then
  redis.call('DEL', KEYS[1])
  return 0
end
if redis.call('GETRANGE', KEYS[1], 0, 64) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local left = redis.call('PTTL', KEYS[1])
if left == -1 or left > tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_RELEASE = """
if redis.call('TYPE', KEYS[1]).ok == 'string'
    and redis.call('GETRANGE', KEYS[1], 0, 64) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class ActingLease:
    """The lease of one autoscaler: take -> ... -> take -> release. ``ttl_s``: seconds until another
    autoscaler can act after the holder died."""

    def __init__(self, client: redis.Redis, cluster: str, ttl_s: float) -> None:
        self._redis = client
        self._key = f"baton:{cluster}:autoscaler:acting"
        self._value = secrets.token_hex(16)
        self._ttl_ms = int(1000 * ttl_s)

    async def take(self) -> bool:
        """Take or keep the lease for ``ttl_s`` from now; return whether this autoscaler has it.
        Raises Unavailable when Redis does not answer."""
        try:
            if await self._run(_KEEP, self._value, self._ttl_ms, _LONGEST_MS):
                return True
            taken = await self._redis.set(self._key, self._value, px=self._ttl_ms, nx=True)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"Redis does not tell which autoscaler acts: {error}") from error
        return bool(taken)

    async def release(self) -> None:
        """Release the lease for others. Raises Unavailable when Redis does not answer."""
        try:
            await self._run(_RELEASE, self._value)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"Redis does not answer: {error}") from error

    async def _run(self, script: str, *arguments: str | int) -> bool:
        found = await self._redis.eval(script, 1, self._key, *arguments)
        return bool(found)
