"""Two engine servers hand sequences over through their arenas while both go on with other work."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from pathlib import Path

import pytest
import torch

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.ipc.channel import BatchDecoder, EngineChannel, encode_batch
from engine.ipc.counters import SpeculationStatus
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.ipc.slot_channel import SlotReceiver, SlotSender
from engine.kv_cache.kv_format import Codec, Precision
from engine.process.server import EngineServer
from engine.structured_output.compiler import GrammarCompiler
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request
from tests.gpu.test_engine import engine_on, hold, requests

DEADLINE_S = 100.0


class ServedEngine:
    """An engine server in a thread, with its front's end of the socket and of the arena."""

    def __init__(self, engine: Engine, shape: ArenaShape) -> None:
        ours, theirs = socket.socketpair()
        our_slots, their_slots = socket.socketpair()
        self._slot_sender = SlotSender(our_slots, lambda: None)
        slot_channel = SlotReceiver(their_slots)
        self.arena = Arena.create(shape)
        self.free = shape.inbound_slots()
        self.tokens: dict[int, list[int]] = {}
        self._socket = ours
        self._decoder: BatchDecoder[m.Event] = BatchDecoder(m.Event)
        channel: EngineChannel[m.Command] = EngineChannel(theirs, m.Command)
        grammars = GrammarCompiler(Path(), 1000, [2])
        server = EngineServer(
            *(engine, grammars, channel, self.arena, slot_channel),
            *(SpeculationStatus(), lambda _role: None),
        )
        self._thread = threading.Thread(target=server.run, daemon=True)
        self._thread.start()
        ours.settimeout(0.001)

    def send(self, *commands: m.Command) -> None:
        self._socket.sendall(encode_batch(commands))

    def send_slot(self, command: m.SlotCommand) -> None:
        self._slot_sender.send(command)

    def events(self) -> list[m.Event]:
        """Return what has come, except tokens and free slots, which are kept here."""
        try:
            events = self._decoder.feed(self._socket.recv(1 << 18))
        except TimeoutError:
            return []
        for event in events:
            if isinstance(event, m.TokensDrawn):
                for handle, token in zip(event.handles, event.tokens, strict=True):
                    self.tokens.setdefault(handle, []).append(token)
            elif isinstance(event, m.SlotsFree):
                self.free += event.slots
        assert not any(isinstance(e, m.ReceiveFailed | m.RequestRefused) for e in events)
        return events

    def close(self) -> None:
        self._socket.close()
        self._thread.join(20)
        self._slot_sender.close()
        self.arena.release_fd()
        assert not self._thread.is_alive()


class Fronts:
    """The fronts of a prefill and a decode worker, with a wire of no length."""

    def __init__(self, prefill: ServedEngine, decode: ServedEngine, codec: Codec) -> None:
        self.prefill, self.decode, self._codec = prefill, decode, codec
        self._frames: deque[m.KVFrame] = deque()
        self._skip: dict[int, int] = {}
        self._wanted: dict[int, Request] = {}
        self._complete: list[int] = []
        self._given: Counter[int] = Counter()  # frames by handle
        self.joined: set[int] = set()
        self.inbound = 0

    def place(self, handle: int, wanted: Request) -> None:
        self._wanted[handle] = wanted
        self.decode.send(m.Receive(handle, wanted))

    def turn(self) -> None:
        for event in self.decode.events():
            if isinstance(event, m.PrefixFound):
                self._skip[event.handle] = event.cached_tokens // BLOCK_TOKENS
                self.decode.send(m.Reserve(event.handle))
            elif isinstance(event, m.Reserved):
                self._prefill(event.handle)
            elif isinstance(event, m.Joined):
                self.joined.add(event.handle)
        self._frames += [e for e in self.prefill.events() if isinstance(e, m.KVFrame)]
        while self._frames and self.decode.free:
            self._pass_on(self._frames.popleft())
        for handle in [h for h in self._complete if h in self.prefill.tokens]:
            self._complete.remove(handle)
            first = self.prefill.tokens[handle][0]
            self.decode.send(m.Join(handle, first, self._given[handle]))
            self.prefill.send_slot(m.EndOffer(handle))
            self.prefill.send(m.Drop(handle))

    def _prefill(self, handle: int) -> None:
        size, skip = self.decode.arena.shape.slot_bytes, self._skip[handle]
        start = m.Prefill(handle, self._wanted[handle], size, self._codec)
        self.prefill.send(start)
        self.prefill.send_slot(m.Skip(handle, skip))
        self.prefill.send_slot(m.Grant(handle, 1000))

    def _pass_on(self, frame: m.KVFrame) -> None:
        slot = self.decode.free.pop()
        payload = self.prefill.arena.slot(frame.slot, frame.nbytes)
        self.decode.arena.slot(slot, frame.nbytes)[:] = payload
        payload[:] = bytes(frame.nbytes)  # it must not be needed any more
        self.prefill.send_slot(m.SlotsFree([frame.slot]))
        where = frame.handle, frame.sequence, slot, frame.piece, frame.nbytes
        self.decode.send_slot(m.Ingest(*where, self._codec))
        self._given[frame.handle] += 1
        self.inbound += 1
        if frame.last:
            self._complete.append(frame.handle)


@pytest.mark.parametrize(
    ("precision", "codec"), [("exact", Codec.RAW), ("fp8", Codec.RAW), ("fp8", Codec.FP8)]
)
def test_handed_over_beside_other_work(device: str, precision: Precision, codec: Codec) -> None:
    engines = [engine_on(device, torch.bfloat16, precision) for _ in "pd"]
    size = max(engines[0].format.block_layer_bytes(c) for c in Codec) * 2
    shape = ArenaShape(slot_bytes=size, inbound=5, outbound=3)
    prefill, decode = (ServedEngine(engine, shape) for engine in engines)
    fronts = Fronts(prefill, decode, codec)
    wanted = requests(16)
    for handle in (0, 4, 8, 12):  # decode all the while
        decode.send(m.Generate(handle, wanted[handle]))
    moved = [handle for handle in range(16) if handle % 4]
    for handle in moved:
        fronts.place(handle, wanted[handle])
    until = time.monotonic() + DEADLINE_S

    def text(handle: int) -> list[int]:
        first = prefill.tokens.get(handle, [])[:1] if handle in moved else []
        return first + decode.tokens.get(handle, [])

    while any(len(text(h)) < wanted[h].sampling.max_tokens for h in range(16)):
        assert time.monotonic() < until, "some text does not end"
        fronts.turn()
    while len(decode.free) < 5:
        assert time.monotonic() < until, "some slot is not given back"
        fronts.turn()
    prefill.close()
    decode.close()
    hold(engines[1], [(wanted[h], text(h)) for h in range(16)])
    assert fronts.joined == set(moved) and fronts.inbound > 30
    assert sorted(decode.free) == shape.inbound_slots()
    assert all(engine.manager.available == 400 for engine in engines)
