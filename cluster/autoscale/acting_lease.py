"""Who acts: of all autoscalers of a cluster the one that holds a key in Redis.

    baton:{cluster}:autoscaler:acting    a random value of the holder, for TTL_S at most

Taken by SET NX, kept and given back only by who wrote the value. A holder that cannot reach Redis
counts it as lost: it might be another's by now.
"""

from __future__ import annotations

import secrets

import redis.asyncio as redis
from redis.exceptions import RedisError

from protocol.errors import Unavailable

_KEEP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class ActingLease:
    """take -> ... -> take -> give_back. ``ttl_s``: how long nobody acts after the holder died."""

    def __init__(self, client: redis.Redis, cluster: str, ttl_s: float) -> None:
        self._redis = client
        self._key = f"baton:{cluster}:autoscaler:acting"
        self._value = secrets.token_hex(16)
        self._ttl_ms = int(1000 * ttl_s)

    async def take(self) -> bool:
        """Whether it is ours, for ``ttl_s`` from now. Raises Unavailable when Redis does not
        answer."""
        try:
            if await self._run(_KEEP, self._value, self._ttl_ms):
                return True
            taken = await self._redis.set(self._key, self._value, px=self._ttl_ms, nx=True)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"Redis does not say who acts: {error}") from error
        return bool(taken)

    async def give_back(self) -> None:
        """So that another need not wait. Raises Unavailable when Redis does not answer."""
        try:
            await self._run(_GIVE_BACK, self._value)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"Redis does not answer: {error}") from error

    async def _run(self, script: str, *arguments: str | int) -> bool:
        found = await self._redis.eval(script, 1, self._key, *arguments)
        return bool(found)
