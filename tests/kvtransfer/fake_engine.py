"""An engine without a model, for tests of what fronts do with its slots.

As a prefill engine it computes a prompt at once (or when ``compute`` says so) and fills slots with
bytes that follow from the piece. As a decode engine it compares what lies in the slots with them.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.collectives.engine_pairs import EnginePairs
from engine.ipc import messages as m
from engine.ipc.pair_messages import PairEvent
from engine.ipc.shared_memory import Arena, ArenaShape, PeerArena, SlotLayout
from engine.kv_cache.kv_format import KVFormat, KVPiece, split_into_pieces
from engine.slots.devices import arena_slots
from kvtransfer.frames import payload_checksum
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Finish

KV = KVFormat(precision="fp8", storage="wide", layers=2, kv_heads=1, head_dim=16, element_bytes=2)
SLOT_BYTES = 4 * KV.layers * KV.block_layer_bytes(KV.codecs[0])  # four blocks
READY = m.EngineReady("model", 320, 1 << 20, KV, 1 << 20, 0.01)


def content(piece: KVPiece, nbytes: int) -> bytes:
    """The KV of a piece."""
    return random.Random(repr(piece)).randbytes(nbytes)


@dataclass
class Offer:
    """A prompt whose KV the fake engine offers."""

    frames: list[tuple[int, KVPiece, int]]  # number, piece, bytes: not yet in slots
    total: int
    credits: int = 0
    computed: bool = False
    ended: bool = False


@dataclass
class Faults:
    """What the fake engine does wrong as a sender."""

    checksum: bool = False  # says a wrong checksum
    reverse: bool = False  # fills the last frame first: no fault
    twice: bool = False  # sends the first frame twice
    unasked: bool = False  # needs no credits
    refill: bool = False  # fills a slot again while it is read
    piece: bool = False  # says another piece than the one due
    held_back: int = 0  # frames that it never fills


@dataclass
class FakeProcess:
    pid: int = field(default_factory=os.getpid)


class FakeEngine:
    """Stands for an ``EngineSession`` and the engine behind it."""

    def __init__(self, slots: int = 8) -> None:
        self.arena = Arena.create(ArenaShape(SLOT_BYTES, slots, slots))
        self.ready: m.EngineReady | None = READY
        self.beat = m.EngineBeat(0, 0, 0, 0)
        self.queued_tokens = self.queued_prompts = 0
        self.latest_prompts = ()
        self.alive = True
        self.process = FakeProcess()
        self.inbound = self.arena.shape.inbound_slots()
        self.on_inbound_free: Callable[[], None] = lambda: None
        self.outbound = deque(self.arena.shape.outbound_slots())
        self.computes: Callable[[int], bool] = lambda blocks: True  # at once; by length
        self.faults = Faults()
        self.reads = True  # empties slots
        self.maps = True  # can map arenas of other workers
        self.offers: dict[int, Offer] = {}
        self.written: dict[int, dict[int, KVPiece]] = defaultdict(dict)  # handle -> frames
        self.unread: list[m.Ingest] = []
        self.peers: dict[int, PeerArena] = {}
        self._early_grants: dict[int, int] = defaultdict(int)
        self._descriptors: deque[int] = deque()
        self._listeners: dict[int, Any] = {}
        self._loop = asyncio.get_running_loop()
        self.on_pair_event: Callable[[PairEvent], None] = lambda event: None
        self.pairs = EnginePairs(arena_slots(self.arena), self._tell_pairs)  # the real ones

    def attach(self, handle: int, listener: Any) -> None:
        self._listeners[handle] = listener

    def detach(self, handle: int) -> None:
        self._listeners.pop(handle, None)

    def end(self) -> None:
        """The engine has died."""
        self.alive = False
        lost, self._listeners = self._listeners, {}
        for listener in lost.values():
            listener.on_lost()
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        threading.Thread(target=self.pairs.close).start()  # it may wait for an operation
        self.arena.release_fd()

    # ---- commands ---------------------------------------------------------------------------

    def send(self, command: m.Command) -> None:
        self._loop.call_soon(self._obey, command)

    def send_prompt(self, command: m.Generate | m.Prefill) -> None:
        self.send(command)

    def _tell_pairs(self, events: Sequence[PairEvent]) -> None:  # called by any thread
        for event in events:
            self._loop.call_soon_threadsafe(lambda event=event: self.on_pair_event(event))

    def send_slot(self, command: m.SlotCommand) -> None:
        self._loop.call_soon_threadsafe(self._obey_slot, command)

    def send_descriptor(self, fd: int) -> None:
        self._descriptors.append(os.dup(fd))

    def _obey(self, command: m.Command) -> None:
        if isinstance(command, m.Prefill | m.Export):
            self._prefill(command)
        elif isinstance(command, m.Drop):
            self.offers.pop(command.handle, None)
            self.written.pop(command.handle, None)

    def _obey_slot(self, command: m.SlotCommand) -> None:
        if not self.alive:
            return
        if isinstance(command, m.Grant):
            if command.handle in self.offers:
                self.offers[command.handle].credits += command.frames
                self._fill(command.handle)
            else:
                self._early_grants[command.handle] += command.frames
        elif isinstance(command, m.EndOffer):
            self.offers.pop(command.handle, None)
        elif isinstance(command, m.SlotsFree):
            assert not set(command.slots) & set(self.outbound), "freed twice"
            self.outbound += command.slots
            for handle in list(self.offers):
                self._fill(handle)
        elif isinstance(command, m.Ingest):
            self.unread.append(command)
            self.read()
        elif isinstance(command, m.MapArena):
            layout = SlotLayout(command.slot_bytes, command.slots)
            peer = PeerArena(self._descriptors.popleft(), layout)
            if self.maps:
                self.peers[command.arena] = peer
            else:
                peer.close()
        elif isinstance(command, m.UnmapArena):
            if command.arena in self.peers:
                self.peers.pop(command.arena).close()
        else:
            self.pairs.submit(command)

    def _tell(self, event: Any) -> None:
        if (listener := self._listeners.get(event.handle)) is not None:
            listener.on_event(event)
        elif isinstance(event, m.KVFrame):
            self.send_slot(m.SlotsFree([event.slot]))

    # ---- sending ----------------------------------------------------------------------------

    def _prefill(self, command: m.Prefill | m.Export) -> None:
        end = -(-len(command.request.context) // BLOCK_TOKENS)
        size = KV.block_layer_bytes(command.codec)
        pieces = split_into_pieces(0, end, KV.layers, size, command.frame_bytes)
        frames = [(i, piece, piece.bytes(size)) for i, piece in enumerate(pieces)]
        if self.faults.reverse:
            frames.reverse()
        if self.faults.twice:
            frames.insert(1, frames[0])
        if self.faults.held_back:
            frames = frames[: -self.faults.held_back]
        handle = command.handle
        granted = self._early_grants.pop(handle, 0)
        offer = self.offers[handle] = Offer(frames, len(pieces), granted)
        cached = end * BLOCK_TOKENS if isinstance(command, m.Export) else 0
        self._tell(m.Started(handle, cached))
        if isinstance(command, m.Export):
            offer.computed = True
            self._fill(handle)
        elif self.computes(end):
            self.compute(handle)

    def compute(self, handle: int) -> None:
        """Compute the prompt: its first token and its KV are there."""
        self.offers[handle].computed = True
        self._listeners[handle].on_token(7, Finish.NONE, None)
        self._fill(handle)

    def _fill(self, handle: int) -> None:
        offer = self.offers[handle]
        while offer.computed and offer.frames and self.outbound:
            if offer.credits <= 0 and not self.faults.unasked:
                return
            offer.credits -= 1
            number, piece, nbytes = offer.frames.pop(0)
            slot = self.outbound.popleft()
            payload, generation = self._write(slot, piece, nbytes)
            checksum = payload_checksum(payload) ^ self.faults.checksum
            said = KVPiece(piece.layer, piece.layers, piece.block + 1, piece.blocks)
            self._tell(
                m.KVFrame(
                    *(handle, number, slot, said if self.faults.piece else piece, nbytes),
                    last=not offer.frames and not self.faults.held_back,
                    generation=generation,
                    checksum=checksum,
                )
            )
            if self.faults.refill:
                self._write(slot, KVPiece(9, 9, 9, 9), nbytes)

    def _write(self, slot: int, piece: KVPiece, nbytes: int) -> tuple[bytes, int]:
        self.arena.begin_fill(slot)
        payload = content(piece, nbytes)
        self.arena.slot(slot, nbytes)[:] = payload
        return payload, self.arena.end_fill(slot)

    # ---- receiving --------------------------------------------------------------------------

    def read(self) -> None:
        """Empty the slots that were filled."""
        while self.reads and self.unread:
            command = self.unread.pop(0)
            if command.arena:
                self._read_in_place(command)
            else:
                self._record(command, self.arena.slot(command.slot, command.nbytes))
                self.inbound.append(command.slot)
                self.on_inbound_free()

    def _read_in_place(self, command: m.Ingest) -> None:
        peer = self.peers.get(command.arena)
        if peer is None:
            why = f"arena {command.arena} cannot be mapped"
            self._tell(m.ReceiveFailed(command.handle, why, by_carrier=True))
        elif peer.generation(command.slot) != command.generation:
            self._tell(m.ReceiveFailed(command.handle, "the slot has other content"))
        else:
            payload = peer.slot(command.slot, command.nbytes)
            if payload_checksum(payload) == command.checksum:
                self._record(command, payload)
            else:
                self._tell(m.ReceiveFailed(command.handle, "a wrong checksum"))
            payload.release()
        self._tell(m.SlotRead(command.handle, command.sequence))

    def _record(self, command: m.Ingest, payload: memoryview) -> None:
        assert payload == content(command.piece, command.nbytes)
        assert command.sequence not in self.written[command.handle]
        self.written[command.handle][command.sequence] = command.piece
