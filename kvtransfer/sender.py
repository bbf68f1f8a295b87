"""The KV server of a worker: streams the KV of prefills to the workers that pull it.

    engine --KVFrame--> prefill service --put--> OutboundTransfer --queue--> thread --> receiver
                                                                     |
                                     slot given back <---------------+

Receivers call ``/baton.v1.KV/Pull`` with a transfer id. The payload is raw bytes on threads of its
own, because protobuf and the event loop would cost more than the copy. A transfer exists as long as
its Prefill.Run call; a Pull that finds none is refused.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from engine.ipc.messages import KVFrame
from engine.kv_cache.kv_format import Codec
from kvtransfer.frames import FrameHeader, pack_frame
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity, server_options
from protocol.security.cluster_token import TokenGuard

SERVICE = "baton.v1.KV"
PULL_METHOD = f"/{SERVICE}/Pull"
TRANSFER_BYTES = 16
MAX_PULLS = 256
_POLL_S = 0.5


class OutboundTransfer:
    """The frames of one transfer on their way to the thread that sends them. ``KVServer`` creates
    it when a Prefill.Run call opens, and closes it when the call ends."""

    def __init__(
        self, transfer: bytes, slot_view: Callable[[int, int], memoryview], codec: Codec
    ) -> None:
        self.transfer = transfer
        self.pulled = False  # a transfer is pulled once
        self._codec = codec
        self._slot_view = slot_view
        self._queue: queue.SimpleQueue[tuple[KVFrame, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )

    def put(self, frame: KVFrame, release: Callable[[], None]) -> None:
        """Send a filled slot. ``release`` is called once, from another thread, when the content of
        the slot has been copied or is no longer needed."""
        self._queue.put((frame, release))

    def close(self) -> None:
        """Release the slots that were not sent, and end the sending thread."""
        self._release_unsent()
        self._queue.put(None)

    def frames(self, is_active: Callable[[], bool]) -> Iterator[bytes]:
        """Yield packed frames until the last one has been sent or the transfer is closed."""
        while is_active():
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
                data = pack_frame(header, self._slot_view(frame.slot, frame.nbytes))
            finally:
                release()
            yield data
            if frame.last:
                return

    def _release_unsent(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1]()


class KVServer:
    """Serves the open outbound transfers of a worker. A worker has one, whichever engine process it
    runs."""

    def __init__(self, token: str, security: EndpointSecurity = LOOPBACK_ONLY) -> None:
        self._security = security
        self._lock = threading.Lock()
        self._transfers: dict[bytes, OutboundTransfer] = {}
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
        """Listen and return host:port. Raises StartupError, for instance when the port is taken."""
        endpoint = self._security.listen(self._server, host, port, "KV")
        self._server.start()
        return endpoint

    def stop(self) -> None:
        self._server.stop(grace=None).wait(5.0)

    def open(
        self,
        transfer: bytes,
        slot_view: Callable[[int, int], memoryview],
        codec: Codec = Codec.RAW,
    ) -> OutboundTransfer:
        """Allow the transfer with this id to be pulled. ``slot_view(slot, nbytes)`` returns the
        first bytes of an outbound slot."""
        outbound = OutboundTransfer(transfer, slot_view, codec)
        with self._lock:
            self._transfers[transfer] = outbound
        return outbound

    def close(self, outbound: OutboundTransfer) -> None:
        """End the transfer; its id is unknown from now on."""
        with self._lock:
            self._transfers.pop(outbound.transfer, None)
        outbound.close()

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._lock:
            outbound = self._transfers.get(request)
            refused = outbound is None or outbound.pulled
            if outbound is not None:
                outbound.pulled = True
        if outbound is None or refused:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such transfer, or it is already pulled")
        else:
            yield from outbound.frames(context.is_active)
