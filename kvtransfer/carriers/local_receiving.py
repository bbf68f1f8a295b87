"""The receiving end of the carrier ``local``: arenas of other workers, mapped by the engine here.

    connecting --arena--> mapped (MapArena) --the socket is closed--> gone (UnmapArena)

A transfer's frames stay in the sender's slots; the engine here reads them (``Ingest``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from engine.ipc import messages as m
from engine.ipc.shared_memory import MAX_PEER_SLOTS
from engine.process.session import EngineSession
from kvtransfer.carrier import CONNECT_S, InboundRequest
from kvtransfer.carriers import local_sockets
from kvtransfer.inbound_frames import InboundFrames
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb


class MappedPeer:
    """The arena of another worker's engine session, mapped by one engine session here.
    ``LocalReceiver`` creates it for the first transfer, and others share it."""

    def __init__(
        self,
        arena: int,
        session: EngineSession,
        address: tuple[str, int],
        token: bytes,
        on_gone: Callable[[], None],
    ) -> None:
        """``arena``: its number here. Raises CarrierFailed if the other worker is not there."""
        self.arena = arena
        self.session = session
        self.slots = self.slot_bytes = 0  # until it is mapped
        self.links: set[LocalLink] = set()
        self._on_gone = on_gone
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._socket = local_sockets.new_socket()
        name, serial = address
        try:
            self._socket.connect(f"\0{name}")
            if not local_sockets.same_user(self._socket):
                raise CarrierFailed("local: the other worker runs as another user")
            local_sockets.send_hello(self._socket, serial, token)
        except OSError as error:
            self._socket.close()
            raise CarrierFailed(f"local: the other worker's socket: {error}") from error
        except CarrierFailed:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._deadline = self._loop.call_later(
            CONNECT_S, self.close, f"no arena came within {CONNECT_S:g} s"
        )

    @property
    def mapped(self) -> bool:
        return self.slots > 0

    def _read(self) -> None:
        try:
            if self.mapped:  # nothing more is due: the other end has closed the socket
                raise CarrierFailed("local: the other worker's engine is gone")
            arena = local_sockets.read_arena(self._socket)
        except BlockingIOError:
            return
        except (OSError, CarrierFailed) as error:
            self.close(str(error))
            return
        self._deadline.cancel()
        try:
            self.session.send_descriptor(arena.fd)
            self.session.send_slot(m.MapArena(self.arena, arena.slot_bytes, arena.slots))
        finally:
            os.close(arena.fd)
        self.slots, self.slot_bytes = arena.slots, arena.slot_bytes
        for link in list(self.links):
            link.on_mapped()

    def close(self, why: str) -> None:
        """Unmap the arena, and fail the transfers from it. Idempotent."""
        if self._gone:
            return
        self._gone = True
        self._deadline.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self.mapped:
            self.session.send_slot(m.UnmapArena(self.arena))
        self._on_gone()
        for link in list(self.links):
            link.fail(CarrierFailed(why))


class LocalLink:
    """The ``InboundLink`` of one transfer whose frames are read in place."""

    def __init__(self, request: InboundRequest, peer: MappedPeer | None) -> None:
        """``peer`` None: it has failed already."""
        self._request = request
        self._peer = peer
        self._frames: InboundFrames | None = None
        self._early: list[pb.FilledSlot] = []  # filled before the arena was mapped
        if peer is not None:
            peer.links.add(self)

    def receive(self, frames: InboundFrames) -> None:
        self._frames = frames

    def on_mapped(self) -> None:
        """The arena is mapped."""
        early, self._early = self._early, []
        try:
            self.on_filled(early)
        except TransferFailed as error:
            self.fail(error)

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        peer, frames = self._peer, self._frames
        if peer is None:
            return  # closed
        if frames is None and slots:
            raise TransferFailed("local: a frame came without a credit")
        if not peer.mapped:
            self._early += slots
            if len(self._early) > MAX_PEER_SLOTS:
                raise TransferFailed(f"local: more than {MAX_PEER_SLOTS} slots were filled")
            return
        for filled in slots:
            assert frames is not None
            if filled.slot >= peer.slots or filled.generation % 2:
                raise TransferFailed(
                    f"local: slot {filled.slot} of {peer.slots} slots, generation"
                    f" {filled.generation}"
                )
            frames.ingest_in_place(
                *(filled.header, peer.arena, filled.slot, filled.generation, peer.slot_bytes)
            )

    def on_slot_read(self, sequence: int) -> None:
        if self._peer is not None:
            taken = pb.PrefillCall.Taken(sequences=[sequence])
            self._request.say(pb.PrefillCall(taken=taken))

    def on_unreadable(self, why: str) -> None:
        """The engine here cannot read the arena: unmap it. Every transfer from it fails."""
        if self._peer is not None:
            self._peer.close(f"local: {why}")

    def fail(self, error: TransferFailed) -> None:
        """End the transfer."""
        if self._peer is not None:
            self._request.failed(error)

    async def close(self) -> None:
        if self._peer is not None:
            self._peer.links.discard(self)
            self._peer = None


class LocalReceiver:
    """The arenas that the engine of this worker has mapped. ``LocalCarrier`` has one."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._peers: dict[tuple[EngineSession, tuple[str, int]], MappedPeer] = {}
        self._arenas = 0

    def connect(self, request: InboundRequest) -> LocalLink:
        """Return a link to the arena that ``request`` names, which is mapped if it is not yet."""
        try:
            return LocalLink(request, self._peer(request))
        except CarrierFailed as error:
            request.failed(error)
            return LocalLink(request, None)

    def _peer(self, request: InboundRequest) -> MappedPeer:
        address = local_sockets.parse_address(request.address)
        key = request.session, address

        def forget() -> None:
            self._peers.pop(key, None)

        if key not in self._peers:
            self._arenas += 1
            self._peers[key] = MappedPeer(
                *(self._arenas, request.session, address, self._token),
                on_gone=forget,
            )
        return self._peers[key]

    def forget_sessions(self) -> None:
        """Close the sockets of engine sessions that have ended here."""
        for (session, _), peer in list(self._peers.items()):
            if not session.alive:
                peer.close("local: the engine here is gone")

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.close("local: this worker is stopping")
