"""The carrier ``grpc``: frames on a gRPC stream. It is always there, and the last to be chosen.

    P: OutboundFrames --take--> KV/Pull's thread --> gRPC --> a thread of D --admit, filled--> slot

D calls ``/baton.v1.KV/Pull`` with a transfer id on P's KV endpoint. A message is the header and the
payload of one frame, as raw bytes on threads, because protobuf and the event loop would cost more
than the copies. gRPC's keepalive ends a stream whose other end is gone or stands still.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from engine.process.session import EngineSession
from kvtransfer.carrier import InboundRequest, OutboundFrame
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.inbound_frames import InboundFrames
from kvtransfer.outbound import OutboundFrames, TransferTable
from protocol.endpoints.grpc_endpoints import (
    LOOPBACK_ONLY,
    ChannelCache,
    EndpointSecurity,
    host_of,
    join_host_port,
    server_options,
)
from protocol.errors import CarrierFailed, TransferFailed
from protocol.security.cluster_token import TokenGuard, token_metadata
from protocol.wire import wire_pb2 as pb

SERVICE = "baton.v1.KV"
PULL_METHOD = f"/{SERVICE}/Pull"
MAX_PULLS = 256
_POLL_S = 0.5
_CLOSE_S = 2.0


class GrpcCarrier:
    """Both ends of KV/Pull of one worker."""

    name = "grpc"
    needs_slots = True

    def __init__(
        self, token: str, security: EndpointSecurity = LOOPBACK_ONLY, port: int = 0
    ) -> None:
        """``port`` 0: any free one."""
        self._security = security
        self._port = port
        self.endpoint = ""  # host:port of the server; empty before ``start``
        self._transfers = TransferTable()
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
        self._metadata = token_metadata(token)
        self._channels = ChannelCache(security.channel, grpc.Channel.close)
        self._threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="kv-sink")

    async def start(self, host: str) -> None:
        self.endpoint = self._security.listen(self._server, host, self._port, "KV")
        self._server.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._server.stop(grace=None).wait, 5.0)
        for channel in self._channels.drain():
            channel.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- the receiving end ------------------------------------------------------------------

    def offer(self, endpoint: str) -> str | None:
        return ""

    def connect(self, request: InboundRequest) -> _Pull:
        return _Pull(request, self._open_stream, self._threads)

    def _open_stream(self, request: InboundRequest) -> Iterator[bytes]:
        """Open the stream of a transfer. Raises CarrierFailed."""
        endpoint = _kv_endpoint(request)
        try:
            channel = self._channels.get(endpoint, self._security.version)
        except TransferFailed as error:
            raise CarrierFailed(str(error)) from error
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PULL_METHOD)
        return method(request.transfer, metadata=self._metadata)

    # ---- the sending end --------------------------------------------------------------------

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        return self.endpoint.rpartition(":")[2]

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> OutboundFrames:
        return self._transfers.open(transfer)

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        outbound = self._transfers.claim(request)
        if outbound is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND, "no such transfer, or it is already being received"
            )
        else:
            yield from _messages(outbound, context.is_active)


def _messages(outbound: OutboundFrames, is_active: Callable[[], bool]) -> Iterator[bytes]:
    """Yield each frame as one message, until the last one or the end of the transfer."""
    while is_active() and not outbound.ended:
        frame = outbound.take(_POLL_S)
        if frame is not None:
            try:
                data = frame_message(frame)
            finally:
                frame.release()
            yield data


def frame_message(frame: OutboundFrame) -> bytes:
    """Return header and payload of a frame; this copies the payload once."""
    return b"".join((frame.header, frame.payload))


def _kv_endpoint(request: InboundRequest) -> str:
    """Return host:port of the sender's KV service: its host is that of its control service.

    Raises CarrierFailed for a port that is none."""
    try:
        port = int(request.address)
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise CarrierFailed(
            f"the other worker gave the invalid KV address {request.address[:40]!r}"
        )
    return join_host_port(host_of(request.endpoint), port)


class _Pull:
    """The ``InboundLink`` of one KV/Pull stream."""

    def __init__(
        self,
        request: InboundRequest,
        open_stream: Callable[[InboundRequest], Iterator[bytes]],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._request = request
        self._threads = threads
        self._stream: Iterator[bytes] | None = None
        self._reading: Future[None] | None = None
        self._closed = threading.Event()
        self._open_stream = open_stream

    def receive(self, frames: InboundFrames) -> None:
        # Not before: at each end a stream holds a thread, also while its prompt waits.
        if self._closed.is_set():
            return
        try:
            self._stream = self._open_stream(self._request)
        except CarrierFailed as error:
            self._request.failed(error)
        else:
            self._reading = self._threads.submit(self._read_frames, self._stream, frames)

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        raise TransferFailed("slots were filled of a transfer whose frames travel on a stream")

    def on_slot_read(self, sequence: int) -> None:
        raise AssertionError("no frame of a stream is read in place")

    async def close(self) -> None:
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()  # type: ignore[attr-defined]
        if self._reading is not None and not self._reading.cancel():
            await asyncio.wait([asyncio.wrap_future(self._reading)], timeout=_CLOSE_S)

    def _read_frames(self, stream: Iterator[bytes], frames: InboundFrames) -> None:
        """Take every frame; blocks the calling thread."""
        try:
            for data in stream:
                view = memoryview(data)
                frame = frames.admit(view[:HEADER_BYTES])
                if len(view) - HEADER_BYTES != frame.header.nbytes:
                    raise TransferFailed(
                        f"frame {frame.header.sequence} says {frame.header.nbytes} bytes and has"
                        f" {len(view) - HEADER_BYTES}"
                    )
                frame.payload[:] = view[HEADER_BYTES:]
                frames.filled(frame)
                if frames.complete:  # do not wait for the sender to say so
                    stream.cancel()  # type: ignore[attr-defined]
                    return
            raise CarrierFailed("grpc: the KV stream ended before its last frame")
        except grpc.RpcError as error:
            self._fail(CarrierFailed(f"grpc: the KV stream broke: {error.code().name}"))
        except TransferFailed as error:
            self._fail(error)

    def _fail(self, error: TransferFailed) -> None:
        if not self._closed.is_set():
            self._request.failed(error)
