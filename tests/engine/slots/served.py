"""An engine server that runs in a thread, and its front: real sockets, arena and copy thread."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import xxhash

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.ipc.channel import BatchDecoder, EngineChannel, encode_batch
from engine.ipc.counters import SpeculationStatus
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.ipc.slot_channel import SlotReceiver, SlotSender
from engine.kv_cache.kv_format import Codec
from engine.process.server import EngineServer
from engine.slots.devices import CopyDevice
from engine.structured_output.compiler import GrammarCompiler
from tests.engine.conftest import request

WAIT_S = 20.0
PROMPT = list(range(3, 140))  # 4 full blocks and 9 tokens
FRAMES = 5
E = TypeVar("E")


class ServedEngine:
    """A server and everything that its front needs. Use ``serving``."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        shape: ArenaShape,
        device: Callable[[Arena], CopyDevice] | None = None,
    ) -> None:
        self.engine = engine
        self.arena = Arena.create(shape)
        self._ours, theirs = socket.socketpair()
        our_slots, their_slots = socket.socketpair()
        self.slot_sender = SlotSender(our_slots, lambda: None)
        self.slot_receiver = SlotReceiver(their_slots)
        self.channel: EngineChannel[m.Command] = EngineChannel(theirs, m.Command)
        self._theirs = theirs
        self.server = EngineServer(
            engine,
            GrammarCompiler(folder, 320, [2]),
            self.channel,
            self.arena,
            self.slot_receiver,
            SpeculationStatus(),
            lambda _role: None,
            device=None if device is None else device(self.arena),
        )
        self.events: list[m.Event] = []  # all but beats and cache changes, in order
        self.beats: list[m.EngineBeat] = []
        self.free = shape.inbound_slots()
        self.problem: BaseException | None = None
        self._decoder: BatchDecoder[m.Event] = BatchDecoder(m.Event)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.problem = error
            self._theirs.close()

    def send(self, *commands: m.Command) -> None:
        self._ours.sendall(encode_batch(commands))

    def slot(self, *commands: m.SlotCommand) -> None:
        for command in commands:
            self.slot_sender.send(command)

    def poll(self, wait_s: float = 0.0) -> bool:
        """Take the events that have arrived; return whether there were any."""
        if not select.select([self._ours], [], [], wait_s)[0]:
            return False
        data = self._ours.recv(1 << 18)
        if not data:
            raise EOFError("the server has ended") from self.problem
        for event in self._decoder.feed(data):
            if isinstance(event, m.SlotsFree):
                self.free += event.slots
            if not isinstance(event, m.EngineBeat | m.CacheChanged):
                self.events.append(event)
            elif isinstance(event, m.EngineBeat):
                self.beats.append(event)
        return True

    def until(self, condition: Callable[[], bool], what: str = "") -> None:
        """Take events until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.events[-10:]}"
            self.poll(0.05)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type[E], handle: int) -> E:
        """Return the first event of a kind about a sequence."""

        def found() -> list[E]:
            return [e for e in self.of(kind) if getattr(e, "handle", None) == handle]

        self.until(lambda: bool(found()), f"{kind.__name__} of {handle}")
        return found()[0]

    def tokens(self, handle: int) -> list[int]:
        return [
            token
            for event in self.of(m.TokensDrawn)
            for h, token in zip(event.handles, event.tokens, strict=True)
            if h == handle
        ]

    def frames(self, handle: int) -> list[m.KVFrame]:
        return [frame for frame in self.of(m.KVFrame) if frame.handle == handle]

    def payload(self, frame: m.KVFrame) -> bytes:
        return bytes(self.arena.slot(frame.slot, frame.nbytes))

    def put(self, handle: int, frame: m.KVFrame, payload: bytes, codec: int = 0) -> None:
        """Put a frame into a free inbound slot, waiting for one, and give it to the thread."""
        self.until(lambda: bool(self.free), "a free slot")
        slot = self.free.pop()
        self.arena.slot(slot, len(payload))[:] = payload
        nbytes = len(payload)
        self.slot(m.Ingest(handle, frame.sequence, slot, frame.piece, nbytes, Codec(codec)))

    def close(self) -> None:
        self._ours.close()
        self._thread.join(WAIT_S)
        self.slot_sender.close()
        assert not self._thread.is_alive()
        self._theirs.close()
        self.arena.release_fd()


@contextlib.contextmanager
def serving(
    engine: Engine,
    folder: Path,
    shape: ArenaShape,
    device: Callable[[Arena], CopyDevice] | None = None,
) -> Iterator[ServedEngine]:
    """Run a server until the end of the block, which raises what has ended it."""
    served = ServedEngine(engine, folder, shape, device)
    served._thread.start()
    try:
        yield served
    finally:
        served.close()
    if served.problem is not None:
        raise served.problem


def shape_of(engine: Engine, inbound: int = 3, outbound: int = 2) -> ArenaShape:
    """Return an arena whose slots hold one block."""
    size = engine.format.block_layer_bytes(Codec.RAW) * engine.format.layers
    return ArenaShape(slot_bytes=size, inbound=inbound, outbound=outbound)


def prefill_frames(prefill: ServedEngine, handle: int) -> list[tuple[m.KVFrame, bytes]]:
    frame_bytes = prefill.arena.shape.slot_bytes
    prefill.slot(m.Grant(handle, 99))  # may arrive before the prefill
    prefill.send(m.Prefill(handle, request(str(handle), PROMPT), frame_bytes, Codec.RAW))
    frames: list[tuple[m.KVFrame, bytes]] = []
    while not frames or not frames[-1][0].last:
        prefill.until(lambda: len(prefill.frames(handle)) > len(frames))
        frame = prefill.frames(handle)[len(frames)]
        payload = prefill.payload(frame)
        assert frame.checksum == xxhash.xxh3_64_intdigest(payload)
        assert frame.generation == prefill.arena.generation(frame.slot)
        frames.append((frame, payload))
        prefill.slot(m.SlotsFree([frame.slot]))
    prefill.until(lambda: bool(prefill.tokens(handle)))
    prefill.slot(m.EndOffer(handle))
    prefill.send(m.Drop(handle))
    return frames


def open_sequence(decode: ServedEngine, handle: int) -> None:
    decode.send(m.Receive(handle, request(str(handle), PROMPT)), m.Reserve(handle))
    decode.wait(m.Reserved, handle)
