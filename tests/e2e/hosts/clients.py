"""Clients on the operator's machine: streams by way of the routers, calm or under load."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import aiohttp

from bench.lib.oracle import StreamRecord, stream
from protocol.requests import Request
from tests.e2e.hosts.cluster import HostCluster
from tests.e2e.hosts.host import Host
from tests.e2e.hosts.sockets import Sockets

_CONNECT_S = 1.5  # then the next router is tried, as a balancer would
_LONGEST_S = 60.0
CALM_S = 1.0
"""Between a client's streams, where what is started meanwhile needs the processors, too."""


class Clients:
    """With an API key; they trust the cluster's CA alone. They ask each router that answers."""

    def __init__(self, cluster: HostCluster) -> None:
        self._cluster = cluster
        self._sockets = Sockets(cluster.o)
        self._salts = (f"{random.getrandbits(64):x}" for _ in itertools.count())
        timeout = aiohttp.ClientTimeout(total=_LONGEST_S, sock_connect=_CONNECT_S)
        self.session = aiohttp.ClientSession(
            connector=self._sockets.connector(cluster.tls()),
            headers={"authorization": f"Bearer {cluster.key}"},
            timeout=timeout,
        )

    async def close(self) -> None:
        await self.session.close()
        self._sockets.close()

    async def ask(self, router: Host, request: Request) -> StreamRecord:
        """A stream of which no cache knows anything."""
        seen = StreamRecord()
        try:
            url = self._cluster.url(router)
            await stream(self.session, url, request, next(self._salts), seen)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            seen.error = f"{router.name}: {error!r}"
        return seen

    async def ask_any(self, routers: Sequence[Host], request: Request) -> StreamRecord:
        """The same by the first router that answers; what has begun is not begun again."""
        seen = StreamRecord()
        for router in routers:
            seen = await self.ask(router, request)
            if seen.tokens or not seen.error:
                break
        return seen

    async def ask_all(
        self, routers: Sequence[Host], asked: Sequence[Request]
    ) -> list[StreamRecord]:
        """All at once, dealt out among the routers."""
        each = zip(itertools.cycle(routers), asked, strict=False)
        return await asyncio.gather(*(self.ask(router, request) for router, request in each))


class Sent(NamedTuple):
    """A stream of the load."""

    request: int
    began: float
    took_s: float
    seen: StreamRecord


class Load:
    """Streams, some at a time, for as long as it lasts; at the end all are finished.

    ``asked``: taken in turn. ``routers``: asked in turn; the next where one does not answer.
    ``pause_s``: between two streams of a client."""

    def __init__(
        self,
        clients: Clients,
        routers: Sequence[Host],
        asked: Sequence[Request],
        at_once: int = 2,
        pause_s: float = 0.1,
    ) -> None:
        self._clients, self._routers, self._asked = clients, routers, asked
        self._turns = itertools.count()
        self._at_once, self._pause_s = at_once, pause_s
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.sent: list[Sent] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._at_once)]
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        while not self._over:
            turn = next(self._turns)
            first = turn % len(self._routers)
            routers = [*self._routers[first:], *self._routers[:first]]
            request = turn % len(self._asked)
            began = time.monotonic()
            seen = await self._clients.ask_any(routers, self._asked[request])
            self.sent.append(Sent(request, began, time.monotonic() - began, seen))
            await asyncio.sleep(self._pause_s)

    async def running(self) -> None:
        """Until some of it is done, and more is under way."""
        await self.more(self._at_once)

    async def more(self, count: int) -> None:
        """Until so many more are done."""
        least = len(self.sent) + count
        async with asyncio.timeout(_LONGEST_S):
            while len(self.sent) < least:
                await asyncio.sleep(0.05)

    def wrong(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """What is amiss with streams that did not get the text they should have."""
        return [
            f"{len(sent.seen.tokens)} tokens of {len(texts[sent.request])}, done={sent.seen.done},"
            f" {sent.seen.error or 'other text'}"
            for sent in self.sent
            if not sent.seen.done or sent.seen.tokens != list(texts[sent.request])
        ]

    def longest_s(self) -> float:
        """Of all streams' waits for a first or a further token."""
        return max(sent.seen.longest_wait_s for sent in self.sent)
