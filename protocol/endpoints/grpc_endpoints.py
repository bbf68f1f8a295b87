"""How the ends of gRPC are opened: mutual TLS, or plain where both are on this machine.

Endpoints come from Redis or from a router. Without TLS only loopback is dialled, so that nobody who
writes into Redis is sent the cluster's token, or prompts.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import grpc

from protocol.errors import StartupError, TransferFailed
from protocol.security.certificates import Pems, check_names, not_after
from protocol.security.cluster_token import check_bind, is_loopback
from protocol.security.tls import Identity, TlsFiles

# MERGED protocol.rpc
# gRPC settings that every channel and server of Baton shares.

Options: TypeAlias = list[tuple[str, int | str]]

INSTANCE_KEY = "x-baton-instance"
"""Metadata of Attach: the instance that the router means. Ports are used again, ids are not."""

MAX_MESSAGE_BYTES = 16 << 20
"""Above any frame (engine/ipc/shared_memory.py) and any request (4 bytes a token)."""


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


class _Server(Protocol):
    """What the asyncio server and the threaded one have in common."""

    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int: ...


class Security:
    """Of all connections of a process. Raises StartupError for files that cannot be used."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._identity = None if tls is None else Identity(tls)
        self._name = None if tls is None else tls.name

    @property
    def version(self) -> int:
        """Another one when certificates were renewed: open new channels in place of the old."""
        return 0 if self._identity is None else self._identity.version

    @property
    def not_after(self) -> float | None:
        """When the certificate in use ends, seconds since the epoch; None: there is none."""
        return None if self._identity is None else not_after(self._identity.current()[1].cert)

    def permits(self, endpoint: str) -> bool:
        """Whether ``endpoint`` (host:port) may be dialled."""
        return self._identity is not None or is_loopback(host_of(endpoint))

    def channel(self, endpoint: str) -> grpc.Channel:
        """Raises TransferFailed for an endpoint that may not be dialled."""
        credentials = self._credentials(endpoint)
        if credentials is None:
            return grpc.insecure_channel(endpoint, options=channel_options())
        return grpc.secure_channel(endpoint, credentials, options=self._options())

    def async_channel(self, endpoint: str) -> grpc.aio.Channel:
        """Raises TransferFailed for an endpoint that may not be dialled."""
        credentials = self._credentials(endpoint)
        if credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=channel_options())
        return grpc.aio.secure_channel(endpoint, credentials, options=self._options())

    def listen(self, server: _Server, host: str, port: int, what: str = "calls") -> str:
        """Listen on ``host:port``, 0 for any; returns the endpoint. Raises StartupError."""
        check_bind(host, tls=self._identity is not None)
        address = join(host, port)
        try:
            if self._identity is None:
                bound = server.add_insecure_port(address)
            else:
                check_names(self._identity.current()[1].cert, host, self._name)
                bound = server.add_secure_port(address, _server_credentials(self._identity))
        except RuntimeError as error:
            raise StartupError(f"cannot listen for {what} on {address}: {error}") from error
        return join(host, bound)

    def _options(self) -> Options:
        """Of a channel with TLS: the server proves the cluster's name, where it has one."""
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
                f"{endpoint!r} is not on this machine, and without TLS nobody else is talked to"
            )
        return None


LOOPBACK = Security()
"""Plain, and this machine only."""


def _server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Asked for at every handshake, so that a renewed certificate is used without a restart."""
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


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def host_of(endpoint: str) -> str:
    """The host in ``host:port`` or ``[address]:port``."""
    return endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
