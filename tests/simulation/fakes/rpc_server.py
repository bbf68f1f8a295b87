"""The server's end of a simulated call, and the queue that both ends read from."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import StatusCode
from grpc.aio import EOF

from tests.simulation.fakes.network import Connection, Stream


class Inbox:
    """What has come by one direction, for one reader."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False  # nothing more comes

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def clear(self) -> None:
        self._items.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Return the next item, or EOF when nothing is left and nothing more comes."""
        while not self._items:
            if self.closed:
                return EOF
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class _Aborted(Exception):
    pass


class ServerCall:
    """The server's end of one call: the context of its handler, and the task that runs it."""

    def __init__(self, connection: Connection, client: Any, method: Any, metadata: Any) -> None:
        self._connection = connection
        self._client = client
        self._handler, self._request = method
        self._metadata = metadata
        self._inbox = Inbox()
        self._task: asyncio.Task[Any] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._cancelled = False
        connection.on_lost[connection.server] = lambda why: self.cancel()

    @property
    def _down(self) -> Stream:
        return self._connection.down

    def start(self) -> None:
        if not self._cancelled:
            self._task = self._connection.server.spawn(self._serve(), "rpc")
            self._task.add_done_callback(self._finish)

    def on_message(self, data: object) -> None:
        assert isinstance(data, bytes)
        self._inbox.put(self._request.FromString(data))

    def cancel(self) -> None:
        """The client is gone, or its connection."""
        self._cancelled = True
        self._connection.close(self._connection.server)
        self._inbox.close()
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[Any]) -> None:
        for callback in self._callbacks:
            callback(self)

    async def _serve(self) -> None:
        ended = StatusCode.OK, ""
        try:
            async for message in self._handler(self._requests(), self):
                data = message.SerializeToString()
                self._down.send(len(data), self._client.on_message, data)
                await self._down.wait_for_room()
        except _Aborted as error:
            ended = error.args
        except Exception as error:
            ended = StatusCode.UNKNOWN, repr(error)
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "a servicer failed", "exception": error})
        self._down.send(16, self._client.on_status, ended)
        self._inbox.close()
        self._connection.close(self._connection.server)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._inbox.get()) is not EOF:
            yield message

    # ---- grpc.aio.ServicerContext -----------------------------------------------------------

    def invocation_metadata(self) -> Any:
        return self._metadata

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def abort(self, code: StatusCode, details: str = "") -> None:
        raise _Aborted(code, details)
