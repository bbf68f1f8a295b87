"""The carrier ``local``: on one host, the receiver's engine reads the sender's slots in place.

    P: slot filled --Filled--> D's front --Ingest--> D's engine: copy, check, write
    P: slot free  <--Taken---- D's front <--SlotRead--+

No payload passes a front. The receiver maps the sender's arena for reading alone, once for each
engine session of the sender. A slot's generation and its checksum tell the receiver's engine
whether what it has copied is the frame that it was told of; the sender need not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from engine.process.session import EngineSession
from kvtransfer.carrier import ACCEPT_PAUSE_S, CONNECT_S, InboundLink, InboundRequest
from kvtransfer.carriers import local_sockets
from kvtransfer.carriers.local_receiving import LocalReceiver
from kvtransfer.carriers.local_sockets import ArenaDescriptor
from kvtransfer.carriers.slot_outbound import SlotOutboundLink
from protocol.errors import CarrierFailed
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.kv")

MAX_RECEIVERS = 256
"""Connections of receivers; further ones are closed at once."""

_SESSION_CHECK_S = 1.0
"""How often sessions are checked: an arena is unmapped so long after its engine has died."""


class LocalCarrier:
    """Both ends of the carrier ``local`` of one worker."""

    name = "local"
    needs_slots = False

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._identity: str | None = None  # until ``start``, and where the host lacks what it takes
        self._name = f"baton-{secrets.token_hex(16)}"
        self._receiver = LocalReceiver(self._token)
        self._listener: socket.socket | None = None
        self._serials: dict[EngineSession, int] = {}  # of sessions whose arenas were offered
        self._next_serial = 1
        self._receivers: dict[socket.socket, int] = {}  # to a session's number; 0: not known yet
        self._checking: asyncio.Task[None] | None = None

    async def start(self, host: str) -> None:
        try:
            self._identity = local_sockets.host_identity()
            self._listener = local_sockets.listen(self._name)
        except OSError as error:
            log.warning("no KV is read in place on this host, other carriers serve: %s", error)
            self._identity = None
            return
        self._loop = asyncio.get_running_loop()
        self._listen()
        self._checking = asyncio.create_task(self._check_sessions(), name="local-carrier")

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        self._receiver.close()
        for sock in list(self._receivers):
            self._drop(sock)
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    async def _check_sessions(self) -> None:
        while True:
            await asyncio.sleep(_SESSION_CHECK_S)
            self._receiver.forget_sessions()
            for session, serial in list(self._serials.items()):
                if not session.alive:
                    del self._serials[session]
                    for sock in [s for s, of in self._receivers.items() if of == serial]:
                        self._drop(sock)

    # ---- the receiving end ------------------------------------------------------------------

    def offer(self, endpoint: str) -> str | None:
        return self._identity

    def connect(self, request: InboundRequest) -> InboundLink:
        return self._receiver.connect(request)

    # ---- the sending end --------------------------------------------------------------------

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        if self._identity is None or offer.address != self._identity:
            return None
        if session not in self._serials:
            self._serials[session] = self._next_serial
            self._next_serial += 1
        return local_sockets.pack_address(self._name, self._serials[session])

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> SlotOutboundLink:
        return SlotOutboundLink(say)

    def _listen(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept_receiver)

    def _accept_receiver(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:  # none is left
                return
            except OSError as error:
                log.warning("receivers of the arena wait %g s: %s", ACCEPT_PAUSE_S, error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            sock.setblocking(False)
            if len(self._receivers) >= MAX_RECEIVERS or not local_sockets.same_user(sock):
                sock.close()
                continue
            self._receivers[sock] = 0
            self._loop.add_reader(sock.fileno(), self._read_hello, sock)
            self._loop.call_later(CONNECT_S, self._drop_silent, sock)

    def _read_hello(self, sock: socket.socket) -> None:
        try:
            if self._receivers[sock]:  # it has its arena: the end of the connection
                raise CarrierFailed("local: the receiver is gone")
            serial = local_sockets.read_hello(sock, self._token)
            self._send_arena(sock, serial)
        except BlockingIOError:
            return
        except (OSError, CarrierFailed) as error:
            if not self._receivers[sock]:
                log.warning("a receiver of the arena is refused: %s", error)
            self._drop(sock)

    def _send_arena(self, sock: socket.socket, serial: int) -> None:
        """Give the arena of a session away. Raises CarrierFailed or OSError."""
        sessions = {number: session for session, number in self._serials.items()}
        session = sessions.get(serial)
        if session is None or not session.alive:
            raise CarrierFailed("local: that engine is gone")
        layout = session.arena.layout
        fd = session.arena.readonly_fd()
        try:
            local_sockets.send_arena(sock, ArenaDescriptor(fd, layout.slot_bytes, layout.slots))
        finally:
            os.close(fd)
        self._receivers[sock] = serial

    def _drop_silent(self, sock: socket.socket) -> None:
        if self._receivers.get(sock) == 0:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        if self._receivers.pop(sock, None) is not None:
            self._loop.remove_reader(sock.fileno())
            sock.close()
