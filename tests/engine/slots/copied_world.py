"""An engine into whose pool frames come, which another engine has computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from engine.slots.incoming import IncomingFrames, LoopItem, RejectedSequence
from tests.engine.conftest import drain, request
from tests.engine.slots.fake_copies import FakeCopyDevice

MakeEngine = Callable[..., Engine]
PROMPT = list(range(3, 140))  # 4 full blocks and 9 tokens
FRAMES = 5
SLOTS = 8


@dataclass
class World:
    """An engine with the frames that come into it, and PROMPT's as a prefill worker sends them. The
    test is the copy thread, the step loop and the front."""

    engine: Engine
    pieces: list[KVPiece]
    frames: list[torch.Tensor]
    first_token: int
    text: list[int]
    staging_slots: int = 4
    sent: list[m.Event] = field(default_factory=list)
    items: list[LoopItem] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = max(len(frame) for frame in self.frames)
        self.slots = torch.zeros(SLOTS, size, dtype=torch.uint8)
        self.device = FakeCopyDevice(self.engine, self.slots, self.staging_slots)
        self.incoming = IncomingFrames(
            self.engine.format, self.device, self.slots, self.sent.append, self.items.append
        )

    def expect(self, handle: int) -> None:
        """Reserve the pages of a sequence whose KV comes from elsewhere."""
        self.engine.receive(handle, request(str(handle), PROMPT, max_tokens=8))
        self.engine.reserve(handle)
        self.engine.plan()
        assert self.engine.scheduler.take_reserved()[-1].handle == handle
        self._lend(handle)

    def import_(self, handle: int) -> tuple[int, int]:
        """Allocate the pages of PROMPT's full blocks that are not cached."""
        found = self.engine.import_(handle, request("fetch", PROMPT))
        self._lend(handle)
        return found

    def _lend(self, handle: int) -> None:
        lease = self.engine.scheduler.sequences[handle].lease
        assert lease is not None
        self.incoming.expect(lease, self.device.fence())

    def ingest(self, handle: int, index: int, slot: int | None = None) -> None:
        """Put frame ``index`` into a slot and give it to the thread."""
        slot, frame = index if slot is None else slot, self.frames[index]
        self.slots[slot, : len(frame)] = frame
        piece = self.pieces[index]
        self.incoming.ingest(m.Ingest(handle, index, slot, piece, len(frame), Codec.RAW))

    def advance(self) -> None:
        """Let the thread go on once."""
        self.incoming.advance()

    def finish(self) -> None:
        """Let everything end."""
        self.device.finish_all()
        while self.incoming.advance():
            self.device.finish_all()

    @property
    def freed(self) -> list[int]:
        return [s for e in self.sent if isinstance(e, m.SlotsFree) for s in e.slots]

    @property
    def events(self) -> list[m.Event]:
        """What was sent but for free slots."""
        return [e for e in self.sent if not isinstance(e, m.SlotsFree)]

    def apply(self) -> list[LoopItem]:
        """Apply what the thread has given to the step loop, as the server does, and return it."""
        taken, self.items[:] = list(self.items), []
        for item in taken:
            if isinstance(item, RejectedSequence):
                self.engine.reject_write(item.handle)
            elif item.handle in self.engine.scheduler.sequences:
                if isinstance(item, m.Join):
                    self.engine.join(item.handle, item.token)
                else:
                    self.engine.end_import(item.handle)
        return taken

    def continued(self, handle: int) -> list[int]:
        """Decode a sequence that has joined, and return the text."""
        return [self.first_token, *drain(self.engine)[handle]]


def new_world(make_engine: MakeEngine, staging_slots: int = 4) -> World:
    source = make_engine()
    source.prefill(1, request("1", PROMPT, max_tokens=8))
    first = drain(source)[1][0]
    size = source.format.block_layer_bytes(Codec.RAW)
    layers = source.format.layers
    pieces = split_into_pieces(0, FRAMES, layers, size, size * layers)
    frames = [torch.zeros(p.bytes(size), dtype=torch.uint8) for p in pieces]
    for piece, frame in zip(pieces, frames, strict=True):
        source.read(1, piece, frame)
    oracle = make_engine()
    oracle.generate(1, request("1", PROMPT, max_tokens=8))
    return World(make_engine(), pieces, frames, first, drain(oracle)[1], staging_slots)


def assert_nothing_left(world: World) -> None:
    """All staging slots can be used again, and no frame is on its way."""
    assert sorted(world.incoming._free) == list(range(world.staging_slots))
    assert not world.incoming.queued and world.incoming.running() is None
