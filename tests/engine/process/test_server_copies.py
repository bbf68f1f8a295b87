"""The server's loop with copies that end later: nothing waits for them, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.ipc.counters import SpeculationStatus
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.kv_cache.kv_format import Codec
from engine.process.server import COPY_POLL_INTERVAL_S, DirectCopies, EngineServer
from engine.process.slot_copies import CopyCompletion, SlotCopies, StreamedCopies
from engine.structured_output.compiler import GrammarCompiler
from tests.engine.conftest import drain, request
from tests.engine.process.fake_copies import FakeCopyDevice, FakeSender

MakeEngine = Callable[..., Engine]
PROMPT = list(range(3, 140))  # 4 full blocks and 9 tokens
INBOUND, OUTBOUND = 3, 2

Turns = Iterator[Sequence[m.Command]]


class ScriptedChannel:
    """Each turn of the loop takes the next commands of ``turns``, and the end closes it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.waits: list[float] = []
        self.sent: list[m.Event] = []

    def receive(self, wait_s: float) -> Sequence[m.Command]:
        self.waits.append(wait_s)
        try:
            return next(self._turns)
        except StopIteration:
            raise ChannelClosed from None

    def send(self, events: Sequence[m.Event]) -> None:
        self.sent += [e for e in events if not isinstance(e, m.EngineBeat | m.CacheChanged)]

    def tokens(self, handle: int) -> list[int]:
        return [
            token
            for event in self.sent
            if isinstance(event, m.TokensDrawn)
            for h, token in zip(event.handles, event.tokens, strict=True)
            if h == handle
        ]


class Worker:
    """One server with its arena, and a script for its front."""

    def __init__(self, engine: Engine, folder: Path, streamed: bool) -> None:
        size = engine.format.page_layer_bytes(Codec.RAW) * engine.format.layers
        self.shape = ArenaShape(slot_bytes=size, inbound=INBOUND, outbound=OUTBOUND)
        arena = Arena.create(self.shape)
        self.slots = torch.frombuffer(arena.map, dtype=torch.uint8).view(-1, size)
        self.engine = engine
        self.device = FakeCopyDevice(engine, self.slots, 2 * INBOUND)
        self.senders = FakeSender(), FakeSender()
        copies: SlotCopies = StreamedCopies(engine, self.device, *self.senders)
        if not streamed:
            copies = DirectCopies(engine, self.slots)
        self.channel = ScriptedChannel(iter(()))
        self._server = EngineServer(
            engine,
            GrammarCompiler(folder, 320, [2]),
            cast("EngineChannel[m.Command]", self.channel),
            arena,
            SpeculationStatus(),
            lambda _role: None,
            copies=copies,
        )

    def run(self, turns: Turns) -> None:
        self.channel._turns = turns
        self._server.run()

    def let_copies_end(self) -> None:
        """End all copies, and deliver what waits for them."""
        self.device.finish_all()
        for sender in self.senders:
            self.channel.sent += sender.deliver()


def new_events(worker: Worker, kind: type[m.Event], seen: list[int]) -> list[m.Event]:
    """Return the events of ``kind`` since the last call with the same ``seen``."""
    found = worker.channel.sent[seen[0] :]
    seen[0] += len(found)
    return [event for event in found if isinstance(event, kind)]


def sent_frames(worker: Worker) -> list[tuple[m.KVFrame, torch.Tensor]]:
    """Prefill PROMPT on ``worker`` and return its frames, given that the front empties slots."""
    frames: list[tuple[m.KVFrame, torch.Tensor]] = []

    def turns() -> Turns:
        seen = [0]
        prefill = m.Prefill(1, request("1", PROMPT), 0, worker.shape.slot_bytes, Codec.RAW)
        commands: list[m.Command] = [prefill, m.Grant(1, 99)]
        for _ in range(30):
            yield commands
            commands = []
            for event in new_events(worker, m.KVFrame, seen):
                assert isinstance(event, m.KVFrame)
                frames.append((event, worker.slots[event.slot, : event.nbytes].clone()))
                worker.slots[event.slot] = 0
                commands.append(m.SlotsFree([event.slot]))
            worker.let_copies_end()

    worker.run(turns())
    return frames


@pytest.fixture(params=[False, True], ids=["direct", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def expected(make_engine: MakeEngine) -> list[int]:
    engine = make_engine()
    engine.generate(1, request("1", PROMPT))
    return drain(engine)[1]


def test_text_after_a_hand_over_is_the_same(
    make_engine: MakeEngine, tiny_folder: Path, streamed: bool, expected: list[int]
) -> None:
    prefill = Worker(make_engine(), tiny_folder, streamed)
    frames = sent_frames(prefill)
    assert [f.sequence for f, _ in frames] == list(range(5)) and frames[-1][0].last
    decode = Worker(make_engine(), tiny_folder, streamed)

    def turns() -> Turns:
        free, seen = list(range(INBOUND)), [0]
        yield [m.Receive(7, request("1", PROMPT)), m.Reserve(7)]
        left = list(frames)
        while left:
            commands: list[m.Command] = []
            while left and free:
                frame, data = left.pop(0)
                slot = free.pop()
                decode.slots[slot, : frame.nbytes] = data
                commands.append(m.Ingest(7, slot, frame.piece, frame.nbytes, Codec.RAW))
            yield commands
            decode.let_copies_end()
            freed = new_events(decode, m.SlotsFree, seen)
            free += [s for e in freed if isinstance(e, m.SlotsFree) for s in e.slots]
        yield [m.Join(7, prefill.channel.tokens(1)[0])]
        for _ in range(20):
            decode.let_copies_end()
            yield []
        assert sorted(free) == list(range(INBOUND)) or not streamed

    decode.run(turns())
    assert prefill.channel.tokens(1) + decode.channel.tokens(7) == expected
    assert m.Joined(7) in decode.channel.sent
    assert decode.device.closed == streamed


def test_other_sequences_go_on_while_frames_are_in_flight(
    make_engine: MakeEngine, tiny_folder: Path, expected: list[int]
) -> None:
    frames = sent_frames(Worker(make_engine(), tiny_folder, streamed=False))
    worker = Worker(make_engine(), tiny_folder, streamed=True)

    def turns() -> Turns:
        other = request("2", [9] * 40, max_tokens=6)
        yield [m.Generate(2, other), m.Receive(7, request("1", PROMPT)), m.Reserve(7)]
        commands: list[m.Command] = []
        for slot, (frame, data) in enumerate(frames[:2]):
            worker.slots[slot, : frame.nbytes] = data
            commands.append(m.Ingest(7, slot, frame.piece, frame.nbytes, Codec.RAW))
        yield [*commands, m.Join(7, 5)]
        for _ in range(12):
            yield []
        assert len(worker.channel.tokens(2)) == 6, "no step waits for a copy"
        assert worker.channel.waits[-1] == COPY_POLL_INTERVAL_S, "and an idle loop looks soon"
        assert not any(isinstance(e, m.SlotsFree | m.Joined) for e in worker.channel.sent)
        yield [m.Drop(7)]
        worker.let_copies_end()
        for _ in range(3):
            yield []
            worker.let_copies_end()
        assert worker.channel.waits[-1] == m.BEAT_S

    worker.run(turns())
    freed = [s for e in worker.channel.sent if isinstance(e, m.SlotsFree) for s in e.slots]
    assert sorted(freed) == [0, 1]
    assert not any(isinstance(e, m.Joined | m.ReceiveFailed) for e in worker.channel.sent)
    assert worker.engine.manager.available == 64


def test_invalid_frame_fails_the_sequence_before_it_joins(
    make_engine: MakeEngine, tiny_folder: Path, streamed: bool
) -> None:
    frames = sent_frames(Worker(make_engine(), tiny_folder, streamed=False))
    worker = Worker(make_engine(), tiny_folder, streamed)

    def turns() -> Turns:
        yield [m.Receive(7, request("1", PROMPT)), m.Reserve(7)]
        frame, data = frames[0]
        worker.slots[0, : frame.nbytes] = data
        worker.slots[0, :8] = 255
        ingest = m.Ingest(7, 0, frame.piece, frame.nbytes, Codec.RAW)
        yield [ingest, m.Join(7, 5)]
        for _ in range(5):
            worker.let_copies_end()
            yield []

    worker.run(turns())
    failed = [e for e in worker.channel.sent if isinstance(e, m.ReceiveFailed)]
    assert [e.handle for e in failed] == [7] and "not finite" in failed[0].why
    assert [e.slots for e in worker.channel.sent if isinstance(e, m.SlotsFree)] == [[0]]
    assert not any(isinstance(e, m.Joined | m.TokensDrawn) for e in worker.channel.sent)


def test_front_hears_of_an_export_before_its_frames(
    make_engine: MakeEngine, tiny_folder: Path
) -> None:
    engine = make_engine()
    engine.generate(1, request("1", PROMPT))
    drain(engine)
    worker = Worker(engine, tiny_folder, streamed=True)
    copied = worker.device.gather

    def gather_at_once(frames: object) -> object:
        work = copied(frames)  # type: ignore[arg-type]
        work.finish()
        return work

    worker.device.gather = gather_at_once  # type: ignore[method-assign, assignment]
    sender = worker.senders[1]
    queue = sender.send_after

    def send_at_once(done: CopyCompletion, events: Sequence[m.Event]) -> None:
        queue(done, events)
        worker.channel.send(sender.deliver())

    sender.send_after = send_at_once  # type: ignore[method-assign]

    def turns() -> Turns:
        export = m.Export(4, request("x", PROMPT), 0, worker.shape.slot_bytes, Codec.RAW)
        yield [export, m.Grant(4, 9)]
        yield []

    worker.run(turns())
    kinds = [type(e) for e in worker.channel.sent]
    assert kinds.index(m.Started) < kinds.index(m.KVFrame)
