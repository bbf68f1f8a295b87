"""gRPC's asyncio API over the simulated network: channels, calls and servers of streams.

    stub.Attach() -> ClientCall --Connection--> ServerCall --> the real servicer

Messages cross as bytes, so no object is shared by two processes. A call ends as gRPC's do: a broken
connection is UNAVAILABLE for the client and a cancellation for the server; reading a cancelled
call raises CancelledError, and writing to one that is over InvalidStateError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc import StatusCode
from grpc.aio import EOF, AioRpcError, Metadata

from tests.simulation.fakes.network import Connection, Network
from tests.simulation.fakes.rpc_server import Inbox, ServerCall
from tests.simulation.fakes.virtual_loop import SimProcess

Ended = tuple[StatusCode, str]


class Endpoints:
    """Which process serves what at an endpoint (host:port)."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._servers: dict[str, tuple[SimProcess, dict[str, Any]]] = {}

    def serve(self, endpoint: str, process: SimProcess, methods: dict[str, Any]) -> None:
        """``methods``: path -> (handler, request class). Handlers are those of a servicer."""
        self._servers[endpoint] = process, methods

    def find(self, endpoint: str) -> tuple[SimProcess, dict[str, Any]] | None:
        """Return who serves there; None if nothing listens."""
        found = self._servers.get(endpoint)
        return found if found is not None and found[0].alive else None


class SimSecurity:
    """Stands for the ``EndpointSecurity`` of one process."""

    version = 0
    not_after = None

    def __init__(self, endpoints: Endpoints, process: SimProcess) -> None:
        self._endpoints = endpoints
        self._process = process

    def permits(self, endpoint: str) -> bool:
        return True

    def async_channel(self, endpoint: str) -> SimChannel:
        return SimChannel(self._endpoints, self._process, endpoint)


class SimChannel:
    """A channel of ``process``. Every call has a connection of its own."""

    def __init__(self, endpoints: Endpoints, process: SimProcess, endpoint: str) -> None:
        self._endpoints, self._process, self._endpoint = endpoints, process, endpoint

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        pass

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., ClientCall]:
        def call(metadata: Any = None, **_: Any) -> ClientCall:
            places = self._endpoints, self._process, self._endpoint
            return ClientCall(*places, path, request_serializer, response_deserializer, metadata)

        return call

    unary_unary = stream_stream  # no unary call is made in a simulation


class ClientCall:
    """The client's end of one call: what a ``StreamStreamCall`` offers."""

    def __init__(
        self,
        endpoints: Endpoints,
        process: SimProcess,
        endpoint: str,
        path: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        metadata: Any,
    ) -> None:
        self._process, self._serialize, self._parse = process, serialize, parse
        self._loop = endpoints.network.loop
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._headers: asyncio.Future[None] = self._loop.create_future()
        self._inbox = Inbox()
        self._connection: Connection | None = None
        found = endpoints.find(endpoint)
        if found is None:
            self._loop.call_later(0.001, self._end, (StatusCode.UNAVAILABLE, "connection refused"))
            return
        server, methods = found
        self._connection = connection = endpoints.network.connect(process, server)
        connection.on_lost[process] = lambda why: self._end((StatusCode.UNAVAILABLE, why))
        served = ServerCall(connection, self, methods[path], tuple(metadata or ()))
        connection.up.send(64, lambda _: served.start(), None)
        self._served = served

    # ---- what the network brings ------------------------------------------------------------

    def on_headers(self, _: object) -> None:
        if not self._headers.done():
            self._headers.set_result(None)

    def on_message(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.on_headers(None)
        if not self._ended.done():
            self._inbox.put(self._parse(data))

    def on_status(self, ended: object) -> None:
        assert isinstance(ended, tuple)
        self._end(ended)
        self._forget()

    def _end(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)
            self.on_headers(None)
            self._inbox.close()
            if self._connection is not None:
                self._connection.up.release_writer()

    def _forget(self) -> None:
        if self._connection is not None:
            self._connection.close(self._process)

    # ---- the API ----------------------------------------------------------------------------

    def done(self) -> bool:
        return self._ended.done()

    def cancelled(self) -> bool:
        return self._ended.done() and self._ended.result()[0] is StatusCode.CANCELLED

    async def initial_metadata(self) -> Metadata:
        await asyncio.shield(self._headers)
        return Metadata()

    async def code(self) -> StatusCode:
        return (await asyncio.shield(self._ended))[0]

    async def details(self) -> str:
        return (await asyncio.shield(self._ended))[1]

    def cancel(self) -> bool:
        if self._ended.done() or not self._process.alive:
            return False
        self._end((StatusCode.CANCELLED, "Locally cancelled by application!"))
        self._inbox.clear()
        if self._connection is not None:
            self._connection.up.send(16, lambda _: self._served.cancel(), None)
            self._forget()
        return True

    async def read(self) -> Any:
        item = await self._inbox.get()
        if item is EOF:
            self._raise_unless_ok()
        return item

    async def write(self, message: Any) -> None:
        if self._ended.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._connection is None:
            await asyncio.shield(self._ended)
            self._raise_unless_ok()
        assert self._connection is not None
        data = self._serialize(message)
        self._connection.up.send(len(data), self._served.on_message, data)
        await self._connection.up.wait_for_room()
        self._raise_unless_ok()

    def _raise_unless_ok(self) -> None:
        if not self._ended.done():
            return
        code, details = self._ended.result()
        if code is StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if code is not StatusCode.OK:
            raise AioRpcError(code, Metadata(), Metadata(), details)


def methods_of(servicer: Any, *served: tuple[str, str, Any]) -> dict[str, Any]:
    """Return the methods of ``Endpoints.serve`` for (path, name, request class) of a servicer."""
    return {path: (getattr(servicer, name), request) for path, name, request in served}
