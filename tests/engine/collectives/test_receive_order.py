"""Three engines that send and three that receive, in random orders: none blocks another."""

import queue
import random
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from engine.ipc.pair_messages import (
    OpenPair,
    PairCommand,
    PairEvent,
    PairReady,
    PairReceive,
    PairSend,
    PairValue,
    SlotFilled,
    SlotSent,
)
from kvtransfer.pairs.receive_turns import ReceiveTurns
from tests.engine.collectives.pair_engines import HOST, PairEngine, make_bytes

FRAMES = 8
NBYTES = 1 << 20  # more than the buffers of a socket take, so that a send waits for its receive


@dataclass
class Front:
    """What the front of D knows."""

    engine: PairEngine
    turns: ReceiveTurns
    opened: set[int] = field(default_factory=set)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (P, frame) -> slot
    received: int = 0


class World:
    """The fronts of all engines, in one thread, with a random delay for each control message."""

    def __init__(self, seed: int, senders: int, receivers: int) -> None:
        self.random = random.Random(seed)
        self.senders = [PairEngine(2, NBYTES, limit=8) for _ in range(senders)]
        for p, engine in enumerate(self.senders):
            engine.fill(0, p)
        self.receivers = [
            Front(PairEngine(8, NBYTES, limit=8), ReceiveTurns(depth=3, burst=4))
            for _ in range(receivers)
        ]
        self.requests: dict[tuple[int, int], queue.SimpleQueue[list[PairCommand]]] = {
            (d, p): queue.SimpleQueue() for d in range(receivers) for p in range(senders)
        }

    def run(self, limit_s: float) -> None:
        """Move ``FRAMES`` frames from every P to every D."""
        for front in self.receivers:
            for p in self.random.sample(range(len(self.senders)), len(self.senders)):
                front.turns.add(bytes([p]), range(FRAMES))
        deadline = time.monotonic() + limit_s
        while any(f.received < FRAMES * len(self.senders) for f in self.receivers):
            assert time.monotonic() < deadline, [f.received for f in self.receivers]
            for d in self.random.sample(range(len(self.receivers)), len(self.receivers)):
                self._ask(d)
                self._handle_events(d)
            self._deliver_requests()
            time.sleep(0.0005)

    def _ask(self, d: int) -> None:
        front = self.receivers[d]
        while (asked := front.turns.ask()) is not None:
            p, sequences = asked[0][0], asked[1]
            pair = f"{p}-{d}"
            sends: list[PairCommand] = []
            if p not in front.opened:
                front.opened.add(p)
                front.engine.submit(OpenPair(pair, 1, HOST))
                sends.append(OpenPair(pair, 0, HOST))
            for sequence in sequences:
                slot = min(set(range(8)) - set(front.slots.values()))
                front.slots[p, sequence] = slot
                front.engine.submit(PairReceive(pair, p, sequence, slot, NBYTES))
                sends.append(PairSend(pair, d, sequence, 0, NBYTES))
            self.requests[d, p].put(sends)

    def _deliver_requests(self) -> None:
        """Each stream of control messages keeps its order; between streams there is none."""
        for (_, p), stream in self.random.sample(list(self.requests.items()), len(self.requests)):
            while not stream.empty() and self.random.random() < 0.5:
                for command in stream.get():
                    self.senders[p].submit(command)

    def _handle_events(self, d: int) -> None:
        front = self.receivers[d]
        for event in drain(front.engine):
            if isinstance(event, PairValue):
                self.requests[d, int(event.pair[0])].put([event])  # behind the OpenPair
            elif isinstance(event, SlotFilled):
                slot = front.slots.pop((event.handle, event.sequence))
                assert torch.equal(front.engine.slots[slot], make_bytes(event.handle, NBYTES))
                front.received += 1
                front.turns.done(bytes([event.handle]), event.sequence)
            else:
                assert isinstance(event, PairReady), event
        for engine in self.senders:
            for event in drain(engine):
                if isinstance(event, PairValue):
                    self.receivers[int(event.pair[2])].engine.submit(event)
                else:
                    assert isinstance(event, PairReady | SlotSent), event

    def close(self) -> None:
        for engine in [*self.senders, *(front.engine for front in self.receivers)]:
            engine.close()


def drain(engine: PairEngine) -> list[PairEvent]:
    events = []
    while not engine.events.empty():
        events.append(engine.events.get())
    return events


@pytest.mark.parametrize("seed", range(4))
def test_three_senders_and_three_receivers_in_random_orders_finish(seed: int) -> None:
    world = World(seed, 3, 3)
    try:
        world.run(limit_s=30)
    finally:
        world.close()
    assert not [t for t in threading.enumerate() if t.name == "collectives"]


def test_requests_are_at_one_transfer_at_a_time_and_turns_alternate() -> None:
    turns = ReceiveTurns(depth=2, burst=3)
    turns.add(b"a", range(10))
    turns.add(b"b", range(2))
    assert turns.ask() == (b"a", [0, 1])
    assert turns.ask() is None
    turns.done(b"a", 0)
    assert turns.ask() == (b"a", [2])
    turns.done(b"a", 1)
    assert turns.ask() is None  # the burst is over, and b waits until a's last request is answered
    turns.done(b"a", 2)
    assert turns.ask() == (b"b", [0, 1])
    turns.done(b"b", 0)
    assert turns.ask() is None
    turns.done(b"b", 1)
    assert turns.ask() == (b"a", [3, 4])


def test_forgotten_transfer_keeps_its_turn_until_its_requests_are_answered() -> None:
    turns = ReceiveTurns(depth=2)
    turns.add(b"a", range(10))
    assert turns.ask() == (b"a", [0, 1])
    turns.forget(b"a")
    turns.add(b"b", [0])
    assert turns.ask() is None
    turns.done(b"a", 0)
    assert turns.ask() is None
    turns.done(b"a", 1)
    assert turns.ask() == (b"b", [0])


def test_transfer_that_waits_alone_has_no_limit_but_the_depth() -> None:
    turns = ReceiveTurns(depth=2, burst=2)
    turns.add(b"a", range(6))
    for first in (0, 2, 4):
        assert turns.ask() == (b"a", [first, first + 1])
        turns.done(b"a", first)
        turns.done(b"a", first + 1)
    assert turns.ask() is None
