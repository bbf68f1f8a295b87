"""Engines without a model that have pairs: in this process, or in one that a test may kill."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeAlias, TypeVar

import torch

from engine.collectives.collective_thread import CollectiveThread
from engine.collectives.pair_groups import PairGroups
from engine.ipc.pair_messages import OpenPair, PairCommand, PairEvent, PairReady, PairValue

SLOT_BYTES = 4 << 20
HOST = "127.0.0.1"
Wanted = TypeVar("Wanted", bound=PairEvent)
MadeEngine = TypeVar("MadeEngine", "PairEngine", "RemoteEngine", "PairEngine | RemoteEngine")


class PairEngine:
    """A collective thread over gloo with slots in main memory."""

    def __init__(self, slots: int = 4, slot_bytes: int = SLOT_BYTES, limit: int = 4) -> None:
        self.slots = torch.zeros(slots, slot_bytes, dtype=torch.uint8)
        self.events: queue.Queue[PairEvent] = queue.Queue()
        self.groups = PairGroups("gloo", torch.device("cpu"), HOST, limit, self.events.put)
        self.thread = CollectiveThread(self.groups, self._slot, self._report)

    def submit(self, command: PairCommand) -> None:
        self.thread.submit(command)

    def fill(self, slot: int, seed: int) -> None:
        """Fill a slot with bytes that follow from ``seed``."""
        self.slots[slot] = make_bytes(seed, self.slots.shape[1])

    def wait_event(self, wait_s: float) -> PairEvent:
        return self.events.get(timeout=wait_s)

    def close(self) -> None:
        assert self.thread.close(5)

    def _report(self, events: Sequence[PairEvent]) -> None:
        for event in events:
            self.events.put(event)

    def _slot(self, slot: int, nbytes: int) -> torch.Tensor:
        if not (0 <= slot < len(self.slots) and 0 < nbytes <= self.slots.shape[1]):
            raise ValueError(f"{nbytes} bytes of slot {slot} of {len(self.slots)}")
        return self.slots[slot, :nbytes]


def make_bytes(seed: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    engine = PairEngine()
    for slot in range(len(engine.slots)):
        engine.fill(slot, slot)
    connection.send("ready")
    while True:
        while connection.poll(0.002):
            engine.submit(connection.recv())
        while not engine.events.empty():
            connection.send(engine.events.get())


class RemoteEngine:
    """A ``PairEngine`` in a process of its own; slot i holds ``make_bytes(i)``."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child,), daemon=True)
        self.process.start()
        child.close()
        assert self._connection.poll(60) and self._connection.recv() == "ready"

    def submit(self, command: PairCommand) -> None:
        self._connection.send(command)

    def wait_event(self, wait_s: float) -> PairEvent:
        if not self._connection.poll(wait_s):
            raise queue.Empty
        event: PairEvent = self._connection.recv()
        return event

    def kill(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


AnyEngine: TypeAlias = PairEngine | RemoteEngine


@contextmanager
def engines(*makers: Callable[[], MadeEngine]) -> Iterator[list[MadeEngine]]:
    """Yield one engine of each maker, and close all of them."""
    made: list[MadeEngine] = []
    try:
        for make in makers:
            made.append(make())  # noqa: PERF401  those made so far are closed if the next one fails
        yield made
    finally:
        for engine in made:
            engine.close()


def open_pair(p: AnyEngine, d: AnyEngine, pair: str, wait_s: float = 10.0) -> None:
    """Connect two engines, and pass on the values by which they find each other."""
    p.submit(OpenPair(pair, 0, HOST))
    d.submit(OpenPair(pair, 1, HOST))
    ready = 0
    deadline = time.monotonic() + wait_s
    while ready < 2:
        assert time.monotonic() < deadline, f"pair {pair} is not connected"
        for engine, other in ((p, d), (d, p)):
            with suppress(queue.Empty):
                event = engine.wait_event(0.005)
                if isinstance(event, PairValue):
                    other.submit(event)
                else:
                    assert event == PairReady(pair), event
                    ready += 1


def wait_for(engine: AnyEngine, kind: type[Wanted], wait_s: float = 10.0) -> Wanted:
    """Return the next event, which has to be of this kind."""
    event = engine.wait_event(wait_s)
    assert isinstance(event, kind), event
    return event
