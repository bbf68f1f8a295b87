"""gRPC settings that every channel and server of Baton shares."""

from __future__ import annotations

from typing import TypeAlias

Options: TypeAlias = list[tuple[str, int | str]]

INSTANCE_KEY = "x-baton-instance"
"""Metadata of Attach: the instance that the router means. Ports are used again, ids are not."""

MAX_MESSAGE_BYTES = 16 << 20
"""Above any frame (engine/arena.py) and any request (4 bytes a token)."""


# A peer that answers no ping for 3 s is gone; idle streams are pinged every 2 s.
_SHARED: Options = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Without this a ping is waited for 60 s, whatever keepalive_timeout_ms says (grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def channel_options() -> Options:
    """For a channel to another worker."""
    return [
        *_SHARED,
        # A worker that comes back is found at once, not after a long back-off.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # One connection for each channel: a stream to a dead instance never rides on another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> Options:
    """For a worker's server: accept those pings, and never share a port with another process."""
    return [
        *_SHARED,
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
