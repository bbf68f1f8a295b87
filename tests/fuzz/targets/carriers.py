"""Greetings and addresses of hostile peers of the carriers tcp, local and nixl."""

from __future__ import annotations

import socket

from kvtransfer.carriers import local_sockets
from kvtransfer.carriers.tcp_connection import HELLO, ConnectionBroken, TcpConnection
from kvtransfer.frames import TRANSFER_BYTES
from kvtransfer.nixl.messages import MAX_METADATA_BYTES, MoverAddress
from protocol.errors import CarrierFailed, TransferFailed
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import FuzzTarget

_TOKEN = b"secret"
_SENT = 8192  # bytes at most into a socket whose other end is read in the same thread
_WITHIN_S = 5.0


def fuzz_one(data: bytes) -> None:
    _tcp_sender(data[:_SENT])
    _tcp_receiver(data[:_SENT])
    _local(data[:_SENT])
    _addresses(data)


def _tcp_pair(data: bytes) -> tuple[TcpConnection, socket.socket]:
    """A connection whose peer has said ``data`` and no more."""
    ours, peer = socket.socketpair()
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
    return TcpConnection(ours), peer


def _tcp_sender(data: bytes) -> None:
    """A receiver that greets and pulls."""
    for said in (data, HELLO + len(_TOKEN).to_bytes(2, "little") + _TOKEN + data):
        connection, peer = _tcp_pair(said[:_SENT])
        try:
            connection.check_greeting(_TOKEN, _WITHIN_S)
            assert said.startswith(HELLO) and _TOKEN in said
            transfer, number = connection.read_pull(_WITHIN_S)
            assert len(transfer) == TRANSFER_BYTES and 0 <= number < 256
        except ConnectionBroken:
            pass
        finally:
            connection.close()
            peer.close()


def _tcp_receiver(data: bytes) -> None:
    """A sender that answers the greeting and the pull."""
    connection, peer = _tcp_pair(data)
    try:
        connection.greet(_TOKEN, _WITHIN_S)
        connection.pull(bytes(TRANSFER_BYTES), 0, _WITHIN_S)
        view = memoryview(bytearray(64))
        connection.receive(view, _WITHIN_S)
    except ConnectionBroken:
        pass
    finally:
        connection.close()
        peer.close()


def _local(data: bytes) -> None:
    """Both ends of the Unix socket; each packet is one message."""
    reader = ByteReader(data)
    packet, descriptors = reader.piece(64), reader.number(6)
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if packet:
            socket.send_fds(peer, [packet], [peer.fileno()] * descriptors)
        peer.shutdown(socket.SHUT_WR)
        try:
            arena = local_sockets.read_arena(ours)
            socket.close(arena.fd)
        except CarrierFailed:
            pass
        if rest := reader.rest():
            second, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            other.send(rest)
            try:
                local_sockets.read_hello(second, _TOKEN)
                assert rest.endswith(_TOKEN)
            except CarrierFailed:
                pass
            finally:
                second.close()
                other.close()
    finally:
        ours.close()
        peer.close()


def _addresses(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        name, serial = local_sockets.parse_address(text)
        assert local_sockets.pack_address(name, serial).split("/")[0] == name
    except CarrierFailed as error:
        assert len(str(error)) < 600
    try:
        address = MoverAddress.decode(text)
    except CarrierFailed as error:
        assert len(str(error)) < 600
        return
    assert len(address.metadata) <= MAX_METADATA_BYTES
    for slot in (-1, 0, address.first_slot, address.first_slot + address.slots):
        try:
            place = address.locate(slot, address.stride)
            assert 0 < place < 1 << 64
        except TransferFailed:
            continue


TARGET = FuzzTarget("carriers", fuzz_one)
