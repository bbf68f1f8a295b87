"""The interface of carriers, which move frames of KV between two workers.

A transfer moves the KV of one Prefill.Run call from the prefill worker (P) to the decode worker
(D):

    P: engine fills a slot --KVFrame--> OutboundLink.put ----+
                                                             | the carrier
    D: engine writes pages <--Ingest-- InboundFrames <-------+  InboundLink

There are two kinds of carriers. A *stream carrier* (grpc, tcp) sends header and payload of each
frame over a connection of its own; D's end reads the header, asks ``InboundFrames.admit`` for a
slot, and reads the payload into it. With a *slot carrier* (local; nixl, nccl) P's end says on the
control stream which slot holds which frame (``PrefillEvent.Filled``), D's end moves the payload
itself (between ``admit`` and ``filled``) or has its engine read it (``ingest_in_place``), and then
says ``PrefillCall.Taken``, so that P may fill the slot again.

One ``Carrier`` object serves both ends of one worker, because both may share sockets, a thread or a
process. All methods are called on the event loop and must not block; a carrier that moves bytes
does so on threads (or in a process) of its own, which it bounds, and nothing of it waits without a
deadline.

How D and P agree: D offers its carriers with ``Carrier.offer``, in order; P takes the first one of
which ``Carrier.accept`` returns an address; D calls ``Carrier.connect`` with it at once, long
before the first frame, so that a dead link is found while P still computes.

Whoever is at the other end is not trusted: lengths, counts, slots and generations that come are
checked before they are used. ``InboundFrames`` checks headers and checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import grpc

from engine.process.session import EngineSession
from kvtransfer.inbound_frames import InboundFrames
from protocol.errors import TransferFailed
from protocol.wire import wire_pb2 as pb

CONNECT_S = 2.0
"""Limit for everything from dialling to the other end's answer."""

ACCEPT_PAUSE_S = 0.5
"""How long a listener rests when a connection cannot be accepted, as a rule because no descriptor
is free: it would be called without end."""

FRAME_SEND_S = 4.0
"""How long a receiver may take none of the filled slots for which it has granted credits. One that
stands still for so long loses its transfer, so that it cannot hold P's slots for ever. It is less
than what another receiver waits for a frame that is due (``decode_worker.handover.FRAME_S``), which
would else blame its own link."""

CARRIER_STALLED = grpc.StatusCode.DATA_LOSS
"""With this code P ends a ``Prefill.Run`` call whose receiver took no frame for FRAME_SEND_S."""


@dataclass(frozen=True)
class OutboundFrame:
    """A frame in a slot of P, ready to be carried. ``PrefillService`` makes it of a ``KVFrame``.

    ``release`` gives the slot back to P's engine. The link calls it exactly once, from any thread,
    when nothing reads the slot any more or nothing needs its content."""

    header: bytes  # packed: HEADER_BYTES (kvtransfer/frames.py)
    payload: memoryview  # of the slot, as long as the payload
    sequence: int  # number of the frame in its transfer
    slot: int  # of the arena of P's engine session
    generation: int  # of the slot's content (engine/ipc/shared_memory.py)
    last: bool  # no frame follows
    release: Callable[[], None]


@dataclass(frozen=True)
class InboundRequest:
    """What D's end has to know to connect one transfer. ``PrefillRunCall`` makes it when P has
    accepted."""

    transfer: bytes  # 16 bytes; P knows the transfer by it
    instance: str  # of P
    endpoint: str  # host:port of P's control service; the host is dialled
    address: str  # P's answer, from its ``Carrier.accept``: not trusted
    session: EngineSession  # D's, with the arena whose slots are filled
    connections: int  # that the link's expected rate asks for, at least 1
    say: Callable[[pb.PrefillCall], None]  # sends ``Taken`` on the control stream; event loop only
    failed: Callable[[TransferFailed], None]
    """Ends the transfer; thread-safe, and idempotent. ``CarrierFailed`` if the link is at fault,
    ``TransferFailed`` if a frame was."""


class InboundLink(Protocol):
    """D's end of one transfer. ``Carrier.connect`` creates it, ``PrefillRunCall`` closes it. Event
    loop only."""

    def receive(self, frames: InboundFrames) -> None:
        """Take frames from now on, until ``frames.complete`` or ``close``. Returns at once.

        It is called once, when D has pages for the frames. Before it no credit is granted, so no
        frame can come yet. Every failure goes to ``InboundRequest.failed``."""

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        """Take note of slots that P has filled (slot carriers; others raise TransferFailed).

        A slot carrier checks the slot's number, admits (or ingests) the frame, moves the payload,
        and says ``Taken``. Raises TransferFailed for what cannot be right."""

    def on_slot_read(self, sequence: int) -> None:
        """The engine has read the frame ``sequence`` that was ingested in place (or has no need of
        it); other carriers ignore it."""

    async def close(self) -> None:
        """End the link; idempotent, also while it still connects. Returns when no thread and no
        process writes to a slot of D any more, which must be soon (about 1 s at most)."""


class OutboundLink(Protocol):
    """P's end of one transfer. ``Carrier.open`` creates it when P accepts the call, and
    ``PrefillService`` closes it when the call ends, however it ends. Event loop only."""

    def put(self, frame: OutboundFrame) -> None:
        """Carry a frame for which D has granted a credit. Returns at once. Frames may be carried in
        any order."""

    def taken(self, sequences: Sequence[int]) -> None:
        """D has read these frames: release their slots (slot carriers; others raise
        TransferFailed). Raises TransferFailed for a number that is not waiting."""

    def close(self) -> None:
        """Release the slots that are not being read, now, and the others as soon as they are let
        go; the transfer id is unknown from now on. Idempotent."""


@runtime_checkable
class InPlaceLink(Protocol):
    """D's end of a transfer whose frames D's engine reads in place."""

    def on_unreadable(self, why: str) -> None:
        """D's engine cannot read P's arena: forget it, so that a later transfer maps it anew."""


@runtime_checkable
class PairMessageLink(Protocol):
    """A link, of either end, whose engines are connected by pairs (``kvtransfer.pairs``)."""

    def on_pair_message(self, message: pb.PairMessage) -> None:
        """Take note of what the other end has said about a pair. Event loop only. Raises
        TransferFailed for what cannot be right."""


class Carrier(Protocol):
    """One way to carry frames, both ends. ``Worker`` creates each once, whatever its role; it
    outlives the engine sessions of the worker, each of which has an arena of its own."""

    name: str
    """In ``CarrierOffer`` and ``Accepted``, in metrics and in records."""

    needs_slots: bool
    """Whether a frame needs an inbound slot of D. Without, credits for all frames are granted at
    once, and P's slots bound what is under way."""

    async def start(self, host: str) -> None:
        """Listen on ``host`` (as checked by ``check_worker_host``), start threads and processes.
        Raises StartupError."""

    async def close(self) -> None:
        """End everything: sockets, threads, processes. Open links fail."""

    # ---- D's end ----------------------------------------------------------------------------

    def offer(self, endpoint: str) -> str | None:
        """Return the address for a ``CarrierOffer`` to the worker whose control service is at
        ``endpoint`` (host:port), empty if P needs to know nothing, or None: not to be offered."""

    def connect(self, request: InboundRequest) -> InboundLink:
        """Begin to connect to P at once, and return without waiting for it. What goes wrong, also a
        malformed address, goes to ``request.failed`` as CarrierFailed."""

    # ---- P's end ----------------------------------------------------------------------------

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        """Return the address for ``Accepted``, by which D's end finds the slots of ``session``, the
        engine session that will fill them; None if this carrier cannot serve the caller."""

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> OutboundLink:
        """Make a transfer known that ``accept`` has just agreed to. ``say`` sends ``Filled`` on the
        control stream (slot carriers); event loop only."""
