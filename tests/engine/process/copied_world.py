"""An engine with streamed copies, and the frames of a prompt that another engine has computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from engine.process.slot_copies import CopyProgress, StreamedCopies
from tests.engine.conftest import drain, request
from tests.engine.process.fake_copies import FakeCopyDevice, FakeSender

MakeEngine = Callable[..., Engine]
PROMPT = list(range(3, 140))  # 4 full blocks and 9 tokens
SLOTS = 8


@dataclass
class World:
    """An engine with streamed copies, and the frames of PROMPT as a prefill worker sends them."""

    engine: Engine
    pieces: list[KVPiece]
    frames: list[torch.Tensor]
    first_token: int
    text: list[int]
    inbound_slots: int = 4
    freed: list[int] = field(default_factory=list)
    events: list[m.Event] = field(default_factory=list)
    released: list[m.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = max(len(frame) for frame in self.frames)
        self.slots = torch.zeros(SLOTS, size, dtype=torch.uint8)
        self.device = FakeCopyDevice(self.engine, self.slots, self.inbound_slots)
        self.inbound, self.outbound = FakeSender(), FakeSender()
        self.copies = StreamedCopies(self.engine, self.device, self.inbound, self.outbound)

    def expect(self, handle: int) -> None:
        """Reserve the pages of a sequence whose KV comes from elsewhere."""
        self.engine.receive(handle, request(str(handle), PROMPT, max_tokens=8))
        self.engine.reserve(handle)
        self.engine.plan()
        assert self.engine.scheduler.take_reserved()[-1].handle == handle

    def ingest(self, handle: int, index: int, slot: int | None = None) -> None:
        """Put frame ``index`` into a slot and give it to the engine."""
        slot, frame = index if slot is None else slot, self.frames[index]
        self.slots[slot, : len(frame)] = frame
        command = m.Ingest(handle, slot, self.pieces[index], len(frame), Codec.RAW)
        assert not self.copies.hold(command)
        assert self.copies.ingest(command) == ()

    def poll(self) -> CopyProgress:
        progress = self.copies.poll()
        arrived = [*progress.events, *self.inbound.deliver()]
        self.freed += [s for e in arrived if isinstance(e, m.SlotsFree) for s in e.slots]
        self.events += [e for e in arrived if not isinstance(e, m.SlotsFree)]
        self.released += progress.released
        return progress

    def finish(self) -> None:
        """Let everything end."""
        while self.copies.busy:
            self.device.finish_all()
            self.poll()

    def continued(self, handle: int) -> list[int]:
        """Join, and return the text."""
        self.engine.join(handle, self.first_token)
        return [self.first_token, *drain(self.engine)[handle]]


def new_world(make_engine: MakeEngine, inbound_slots: int = 4) -> World:
    source = make_engine()
    source.prefill(1, request("1", PROMPT, max_tokens=8))
    first = drain(source)[1][0]
    size = source.format.page_layer_bytes(Codec.RAW)
    pieces = split_into_pieces(0, 5, source.format.layers, size, size * source.format.layers)
    frames = [torch.zeros(p.bytes(size), dtype=torch.uint8) for p in pieces]
    for piece, frame in zip(pieces, frames, strict=True):
        source.read(1, piece, frame)
    oracle = make_engine()
    oracle.generate(1, request("1", PROMPT, max_tokens=8))
    return World(make_engine(), pieces, frames, first, drain(oracle)[1], inbound_slots)


def assert_nothing_left(world: World) -> None:
    """All staging slots can be used again, and no frame is counted."""
    assert sorted(world.copies._free) == list(range(world.inbound_slots))
    assert not world.copies._unwritten and not world.copies._held and not world.copies.busy
