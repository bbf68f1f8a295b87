"""The sending end: serves ``/baton.v1.KV/Pull`` from outlets that prefills fill.

    engine --Frame--> prefill service --put--> Outlet --queue--> Pull's thread --bytes--> receiver
                                                                    |
                                     slot given back <--------------+

Payload is raw bytes on threads of its own: protobuf and the event loop would cost more than the
copy. An outlet lives as long as its Prefill call; a Pull that finds none is refused.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from engine.ipc.messages import Frame
from engine.kv_cache.kv_format import Codec
from kvtransfer.frames import FrameHeader, pack
from protocol.endpoints.grpc_endpoints import LOOPBACK, Security, server_options
from protocol.security.cluster_token import TokenGuard

SERVICE = "baton.v1.KV"
PULL = f"/{SERVICE}/Pull"
TRANSFER_BYTES = 16
MAX_PULLS = 256
_POLL_S = 0.5


class Outlet:
    """Frames of one transfer on their way to the thread that sends them."""

    def __init__(
        self, transfer: bytes, view: Callable[[int, int], memoryview], codec: Codec
    ) -> None:
        self.transfer = transfer
        self._codec = codec
        self.taken = False
        self._view = view
        self._queue: queue.SimpleQueue[tuple[Frame, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )

    def put(self, frame: Frame, release: Callable[[], None]) -> None:
        """Hand over a filled slot; ``release`` is called once, from another thread, when the
        slot's content has been copied or is no longer wanted."""
        self._queue.put((frame, release))

    def close(self) -> None:
        """The Prefill call is over: release what was not sent, and end the sending thread."""
        self._discard()
        self._queue.put(None)

    def frames(self, active: Callable[[], bool]) -> Iterator[bytes]:
        """Packed frames until the last one, or until the outlet is closed."""
        while active():
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if item is None:
                return
            frame, release = item
            header = FrameHeader(
                self.transfer, frame.sequence, frame.piece, frame.nbytes, self._codec
            )
            try:
                data = pack(header, self._view(frame.slot, frame.nbytes))
            finally:
                release()
            yield data
            if frame.last:
                return

    def _discard(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1]()


class KVSource:
    """The KV server of a worker, and the outlets that it may serve now."""

    def __init__(self, token: str, security: Security = LOOPBACK) -> None:
        self._security = security
        self._lock = threading.Lock()
        self._outlets: dict[bytes, Outlet] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="kv-pull"),
            options=server_options(),
            interceptors=[TokenGuard(token)],
        )
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
            self._pull
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {"Pull": handler})]
        )

    def start(self, host: str, port: int) -> str:
        """Listen; returns host:port. Raises StartupError, as when the port is taken."""
        endpoint = self._security.listen(self._server, host, port, "KV")
        self._server.start()
        return endpoint

    def stop(self) -> None:
        self._server.stop(grace=None).wait(5.0)

    def open(
        self,
        transfer: bytes,
        view: Callable[[int, int], memoryview],
        codec: Codec = Codec.RAW,
    ) -> Outlet:
        outlet = Outlet(transfer, view, codec)
        with self._lock:
            self._outlets[transfer] = outlet
        return outlet

    def close(self, outlet: Outlet) -> None:
        with self._lock:
            self._outlets.pop(outlet.transfer, None)
        outlet.close()

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._lock:
            outlet = self._outlets.get(request)
            refused = outlet is None or outlet.taken
            if outlet is not None:
                outlet.taken = True
        if outlet is None or refused:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such transfer, or it is already pulled")
        else:
            yield from outlet.frames(context.is_active)
