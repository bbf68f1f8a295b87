"""Fronts without engines: slots that are always filled, and emptied at once.

``FilledSlots`` stands for the ``EngineSession`` of a worker, so that a transfer between two of them
takes the time of the carrier alone. The frames of another worker's arena are read by the engine's
own code, on a thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from bench.kv_link.product.shapes import KVShape
from engine.collectives.engine_pairs import EnginePairs
from engine.ipc import messages as m
from engine.ipc.pair_messages import PairEvent
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from engine.process.session import SequenceListener
from engine.slots.devices import arena_slots
from engine.slots.peer_slots import PeerSlots
from kvtransfer.frames import payload_checksum
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed
from protocol.requests import Finish

_SequenceEvent: TypeAlias = m.Reserved | m.Started | m.KVFrame | m.SlotRead | m.ReceiveFailed


@dataclass
class _Process:
    """The engine's process, which is the front's own here."""

    pid: int = field(default_factory=os.getpid)


@dataclass
class _Offer:
    """A prompt whose frames are sent."""

    pieces: deque[KVPiece]
    codec: Codec
    credits: int = 0
    sent: int = 0


class FilledSlots:
    """One session. Its methods are those of ``EngineSession`` that transfers use."""

    def __init__(self, shape: KVShape, ready: m.EngineReady) -> None:
        self.arena = Arena.create(ArenaShape())
        self.ready = ready
        self.beat = m.EngineBeat(0, 0, 0, 0)
        self.queued_tokens = self.queued_prompts = 0
        self.latest_prompts = ()
        self.alive = True
        self.process = _Process()
        self.inbound = self.arena.shape.inbound_slots()
        self.on_inbound_free: Callable[[], None] = lambda: None
        self.on_pair_event: Callable[[PairEvent], None] = lambda event: None
        self._pairs = EnginePairs(arena_slots(self.arena), self._on_pair_events)
        self._shape = shape
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, SequenceListener] = {}
        self._outbound = deque(self.arena.shape.outbound_slots())
        self._checksums: dict[tuple[int, int], int] = {}  # by slot and bytes
        self._offers: dict[int, _Offer] = {}
        self._read = 0  # frames of the transfer into this worker
        self._join: m.Join | None = None
        self._peers = PeerSlots()
        self._descriptors: deque[int] = deque()
        self._private = np.zeros(self.arena.shape.slot_bytes, dtype=np.uint8)
        self._copying = ThreadPoolExecutor(1)

    def fill(self) -> None:
        """Put random bytes into the outbound slots."""
        content = os.urandom(self.arena.shape.slot_bytes)
        for slot in self._outbound:
            self.arena.slot(slot, len(content))[:] = content

    def end(self) -> None:
        self.alive = False
        self._copying.shutdown()
        self._pairs.close()
        self._peers.close()
        self.arena.release_fd()

    def attach(self, handle: int, listener: SequenceListener) -> None:
        self._listeners[handle] = listener

    def detach(self, handle: int) -> None:
        self._listeners.pop(handle, None)

    # ---- commands ---------------------------------------------------------------------------

    def send(self, command: m.Command) -> None:
        self._loop.call_soon(self._apply, command)

    def send_prompt(self, command: m.Generate | m.Prefill) -> None:
        self.send(command)

    def send_slot(self, command: m.SlotCommand) -> None:
        self._loop.call_soon_threadsafe(self._apply_slot, command)

    def send_descriptor(self, fd: int) -> None:
        self._descriptors.append(os.dup(fd))

    def _apply(self, command: m.Command) -> None:
        if isinstance(command, m.Prefill):
            self._prefill(command)
        elif isinstance(command, m.Reserve):
            self._read, self._join = 0, None
            self._tell(m.Reserved(command.handle))
        elif isinstance(command, m.Join):
            self._join = command
            self._end_if_read()
        elif isinstance(command, m.Drop):
            self._offers.pop(command.handle, None)

    def _apply_slot(self, command: m.SlotCommand) -> None:
        if isinstance(command, m.SlotsFree):
            self._outbound += command.slots
            self._fill_slots()
        elif isinstance(command, m.Grant):
            if (offer := self._offers.get(command.handle)) is not None:
                offer.credits += command.frames
            self._fill_slots()
        elif isinstance(command, m.Ingest):
            self._ingest(command)
        elif isinstance(command, m.MapArena):
            self._copying.submit(self._peers.map, command, self._descriptors.popleft)
        elif isinstance(command, m.UnmapArena):
            self._copying.submit(self._peers.unmap, command.arena)
        elif not isinstance(command, m.Skip | m.EndOffer):
            self._pairs.submit(command)

    def _on_pair_events(self, events: Sequence[PairEvent]) -> None:
        """Called by the thread of the collectives."""
        for event in events:
            self._loop.call_soon_threadsafe(self.on_pair_event, event)

    def _tell(self, event: _SequenceEvent) -> None:
        if (listener := self._listeners.get(event.handle)) is not None:
            listener.on_event(event)

    # ---- the sender -------------------------------------------------------------------------

    def _prefill(self, command: m.Prefill) -> None:
        kv, blocks = self._shape.kv_format, len(command.request.prompt) // BLOCK_TOKENS
        size = kv.block_layer_bytes(command.codec)
        pieces = split_into_pieces(0, blocks, kv.layers, size, command.frame_bytes)
        self._offers[command.handle] = _Offer(deque(pieces), command.codec)
        self._tell(m.Started(command.handle, 0))
        self._listeners[command.handle].on_token(0, Finish.NONE, None)

    def _fill_slots(self) -> None:
        for handle, offer in self._offers.items():
            while offer.credits and offer.pieces and self._outbound:
                self._send(handle, offer)

    def _send(self, handle: int, offer: _Offer) -> None:
        piece, slot = offer.pieces.popleft(), self._outbound.popleft()
        nbytes = self._shape.kv_format.piece_bytes(piece, offer.codec)
        if (slot, nbytes) not in self._checksums:
            self._checksums[slot, nbytes] = payload_checksum(self.arena.slot(slot, nbytes))
        self.arena.begin_fill(slot)
        where = handle, offer.sent, slot, piece, nbytes, not offer.pieces
        generation, checksum = self.arena.end_fill(slot), self._checksums[slot, nbytes]
        offer.credits -= 1
        offer.sent += 1
        self._tell(m.KVFrame(*where, generation, checksum))

    # ---- the receiver -----------------------------------------------------------------------

    def _ingest(self, command: m.Ingest) -> None:
        if command.arena:
            self._copying.submit(self._copy, command)
            return
        self.inbound.append(command.slot)
        self.on_inbound_free()
        self._count_read()

    def _copy(self, command: m.Ingest) -> None:
        """Copy and check a frame of another arena; a thread runs it."""
        try:
            self._peers.copy(command, self._private[: command.nbytes])
        except TransferFailed as error:
            failed = m.ReceiveFailed(command.handle, str(error))
            self._loop.call_soon_threadsafe(self._tell, failed)
        else:
            self._loop.call_soon_threadsafe(self._on_copied, command)

    def _on_copied(self, command: m.Ingest) -> None:
        self._tell(m.SlotRead(command.handle, command.sequence))
        self._count_read()

    def _count_read(self) -> None:
        self._read += 1
        self._end_if_read()

    def _end_if_read(self) -> None:
        if self._join is not None and self._read >= self._join.frames:
            listener = self._listeners.get(self._join.handle)
            self._join = None
            if listener is not None:
                listener.on_token(0, Finish.NONE, None)


class FilledSlotsClient:
    """Stands for the ``EngineClient`` of a worker."""

    def __init__(self, shape: KVShape, ready: m.EngineReady, *, sending: bool) -> None:
        self._shape = shape
        self._ready = ready
        self._sending = sending
        self._handles = itertools.count(1)
        self.current: FilledSlots | None = None

    async def start(self) -> None:
        self.current = FilledSlots(self._shape, self._ready)
        if self._sending:
            self.current.fill()

    async def stop(self) -> None:
        if self.current is not None:
            self.current.end()

    def handle(self) -> int:
        return next(self._handles)
