"""Bare gRPC on loopback: raw bytes from a synchronous stream, discarded by the receiver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from bench.kv_link.media.memory import MIB, digest, make_buffer

_METHOD = "/bench.Link/Push"
WAIT_S = 30.0
MESSAGE_BYTES = MIB
"""Of one message; the fastest size on loopback."""

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcEnd:
    """The receiver serves one method, whose answer is the number of bytes that came."""

    def __init__(self, sending: bool) -> None:
        self._buffer = make_buffer(True) if sending else None
        self._messages: list[bytes] = []
        self._crc = 0
        self._server: grpc.Server | None = None
        self._channel: grpc.Channel | None = None

    def open(self, options: dict[str, Any]) -> int:
        if self._buffer is not None:
            return 0
        self._server = grpc.server(ThreadPoolExecutor(2), options=_UNLIMITED)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(
            self._push
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("bench.Link", {"Push": handler})]
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return port

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        # The last few messages are kept, as a receiver with few buffers would keep them.
        count = 0
        self._messages = []
        for message in messages:
            count += len(message)
            self._messages = [*self._messages[-3:], message]
        return count.to_bytes(8, "little")

    def connect(self, other: int) -> None:
        if self._buffer is None:
            return
        self._channel = grpc.insecure_channel(f"127.0.0.1:{other}", options=_UNLIMITED)
        grpc.channel_ready_future(self._channel).result(timeout=WAIT_S)

    def run(self, job: dict[str, Any]) -> None:
        if self._channel is None:
            return  # the server's threads receive
        size = job["bytes"]
        push: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(_METHOD)
        came = int.from_bytes(push(self._slices(size), timeout=WAIT_S), "little")
        if came != size:
            raise ConnectionError(f"{came} bytes came of {size}")

    def _slices(self, size: int) -> Iterator[bytes]:
        assert self._buffer is not None
        for start in range(0, size, MESSAGE_BYTES):
            yield bytes(self._buffer[start : min(size, start + MESSAGE_BYTES)])

    def digest(self, job: dict[str, Any]) -> int:
        """Return the checksum of the last message."""
        if self._buffer is None:
            return digest(memoryview(self._messages[-1]))
        last = (job["bytes"] - 1) // MESSAGE_BYTES * MESSAGE_BYTES
        return digest(self._buffer[last : job["bytes"]])

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.stop(grace=None).wait(5.0)
