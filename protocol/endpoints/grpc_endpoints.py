"""Opens gRPC servers and channels: with mutual TLS, or in plain text on this machine only.

Endpoints come from Redis or from a router. Without TLS only loopback is dialled, so that a forged
record in Redis cannot attract the cluster token or prompts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc

from protocol.errors import StartupError, TransferFailed
from protocol.security.certificates import PemBundle, check_certificate_host, not_after
from protocol.security.listen_hosts import check_worker_host, is_loopback
from protocol.security.tls import TlsFiles, TlsIdentity

GrpcOptions: TypeAlias = list[tuple[str, int | str]]

INSTANCE_KEY = "x-baton-instance"
"""Metadata of Attach: the instance that the router expects. Ports are reused, ids are not."""

MAX_MESSAGE_BYTES = 16 << 20
"""Larger than any frame (engine/ipc/shared_memory.py) and any request (4 bytes per token)."""

SERVER_PING_S = 3.0
"""A server that answers no ping for so long is gone: its work is done elsewhere."""

CALLER_PING_S = 10.0
"""A caller that answers no ping for so long is gone. Its work here is freed then, and nothing else
waits for it, so a caller that stood still for a few seconds keeps its streams."""

# Idle streams are pinged every 2 s.
_SHARED: GrpcOptions = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def _ping_timeout(seconds: float) -> GrpcOptions:
    return [
        ("grpc.keepalive_timeout_ms", int(1000 * seconds)),
        # Without this gRPC waits 60 s for a ping, whatever keepalive_timeout_ms is (grpcio 1.85).
        ("grpc.http2.ping_timeout_ms", int(1000 * seconds)),
    ]


def channel_options() -> GrpcOptions:
    """Return the options of a channel to another process."""
    return [
        *_SHARED,
        *_ping_timeout(SERVER_PING_S),
        # A worker that comes back is found at once, not after a long back-off.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # One connection for each channel: a stream to a dead instance never rides on another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> GrpcOptions:
    """Return the options of a server: it accepts those pings, and shares its port with no other
    process."""
    return [
        *_SHARED,
        *_ping_timeout(CALLER_PING_S),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


class _Server(Protocol):
    """The methods that the asyncio server and the threaded one share."""

    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int: ...


class EndpointSecurity:
    """Opens all gRPC servers and channels of one process, which creates it at its start.

    Raises StartupError for TLS files that cannot be used."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._identity = None if tls is None else TlsIdentity(tls)
        self._name = None if tls is None else tls.name

    @property
    def version(self) -> int:
        """Number of certificate renewals; after each, callers open new channels."""
        return 0 if self._identity is None else self._identity.version

    @property
    def not_after(self) -> float | None:
        """When the certificate in use expires, in seconds since the epoch; None without TLS."""
        return None if self._identity is None else not_after(self._identity.current()[1].cert)

    def permits(self, endpoint: str) -> bool:
        """Return whether ``endpoint`` (host:port) may be dialled."""
        return self._identity is not None or is_loopback(host_of(endpoint))

    def channel(self, endpoint: str) -> grpc.Channel:
        """Return a new channel. Raises TransferFailed for an endpoint that may not be dialled."""
        credentials = self._credentials(endpoint)
        if credentials is None:
            return grpc.insecure_channel(endpoint, options=channel_options())
        return grpc.secure_channel(endpoint, credentials, options=self._tls_options())

    def async_channel(self, endpoint: str) -> grpc.aio.Channel:
        """Return a new channel. Raises TransferFailed for an endpoint that may not be dialled."""
        credentials = self._credentials(endpoint)
        if credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=channel_options())
        return grpc.aio.secure_channel(endpoint, credentials, options=self._tls_options())

    def listen(self, server: _Server, host: str, port: int, what: str = "calls") -> str:
        """Listen on ``host:port`` (port 0: any free one) and return the endpoint.

        Raises StartupError."""
        check_worker_host(host, tls=self._identity is not None)
        address = join_host_port(host, port)
        try:
            if self._identity is None:
                bound = server.add_insecure_port(address)
            else:
                check_certificate_host(self._identity.current()[1].cert, host, self._name)
                bound = server.add_secure_port(address, _server_credentials(self._identity))
        except RuntimeError as error:
            raise StartupError(f"cannot listen for {what} on {address}: {error}") from error
        return join_host_port(host, bound)

    def _tls_options(self) -> GrpcOptions:
        """Return channel options by which the server must prove the cluster's name, if it has
        one."""
        options = channel_options()
        if self._name is not None:
            options.append(("grpc.ssl_target_name_override", self._name))
        return options

    def _credentials(self, endpoint: str) -> grpc.ChannelCredentials | None:
        if self._identity is not None:
            pems = self._identity.current()[1]
            return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        if not is_loopback(host_of(endpoint)):
            raise TransferFailed(
                f"{endpoint!r} is not on this machine, and connections to other machines need TLS"
            )
        return None


LOOPBACK_ONLY = EndpointSecurity()
"""Plain text, on this machine only."""


def _server_credentials(identity: TlsIdentity) -> grpc.ServerCredentials:
    """Return credentials that gRPC asks for at every handshake, so that a renewed certificate is
    used without a restart."""
    used, pems = identity.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        version, pems = identity.current()
        if version == used:
            return None
        used = version
        return _configuration(pems)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(pems),
        fetch,  # type: ignore[arg-type]  # None means no change; the stub does not know
        require_client_authentication=True,
    )


def _configuration(pems: PemBundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def host_of(endpoint: str) -> str:
    """Return the host of ``host:port`` or ``[address]:port``."""
    return endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


C = TypeVar("C")

IDLE_S = 600.0
"""A channel that has not been used for so long is closed; no call lasts longer. Workers that
restart come back on other ports, and the channels to the old ports would pile up."""


class ChannelCache(Generic[C]):
    """One channel for each endpoint, opened when it is first used and closed when it is idle."""

    def __init__(
        self,
        open_channel: Callable[[str], C],
        close_channel: Callable[[C], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._close, self._clock = open_channel, close_channel, clock
        # By endpoint and version; the longest unused first.
        self._channels: OrderedDict[tuple[str, int], tuple[C, float]] = OrderedDict()

    def get(self, endpoint: str, version: int = 0) -> C:
        """Return the channel to ``endpoint`` (host:port). Another ``version`` gets another channel;
        calls on the old one go on."""
        now, key = self._clock(), (endpoint, version)
        channel, _ = self._channels.pop(key, (None, 0.0))
        if channel is None:
            channel = self._open(endpoint)
        self._channels[key] = (channel, now)
        while now - next(iter(self._channels.values()))[1] > IDLE_S:
            _, (idle, _) = self._channels.popitem(last=False)
            self._close(idle)
        return channel

    def drain(self) -> list[C]:
        """Forget all channels and return them; the caller closes them."""
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        return channels
