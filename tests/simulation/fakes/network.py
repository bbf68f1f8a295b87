"""The network: connections between processes, with seeded delays and cuts.

    write --in flight--> [latency, held while the way is cut or the receiver stands still] --> read

A connection behaves like TCP under gRPC's keep-alive. Nothing is lost or reordered on it. An end
that has heard nothing for KEEPALIVE_S, because the way is cut or the other process stands still,
gives it up; the other end learns of that by the network as soon as it can. A process that was
killed resets its connections.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable

from tests.simulation.fakes.virtual_loop import SimProcess, VirtualLoop

KEEPALIVE_S = (4.0, 6.0)
"""A ping every 2 s, which is answered within 3 s (protocol/endpoints/grpc_endpoints.py)."""

WINDOW_BYTES = 512
"""Bytes in flight in one direction of a connection beyond which a writer waits. It is small, as the
messages of a simulation are."""


class Network:
    """All connections of one simulation, and which ways are cut or slow."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, latency_s: float) -> None:
        """``latency_s``: the longest time of a message where nothing is wrong."""
        self.loop = loop
        self.rng = rng
        self._latency_s = latency_s
        self._cut: set[tuple[str, str]] = set()  # by names: from, to
        self._slow: dict[tuple[str, str], float] = {}  # seconds that every message takes longer
        self.connections: list[Connection] = []

    def latency(self, a: SimProcess, b: SimProcess) -> float:
        """Return the time of one message from ``a`` to ``b``."""
        base = 0.0002 + self._latency_s * self.rng.random() ** 2
        return base + self._slow.get((a.name, b.name), 0.0) * self.rng.random()

    def is_cut(self, a: SimProcess, b: SimProcess) -> bool:
        return (a.name, b.name) in self._cut

    def cut(self, a: SimProcess, b: SimProcess) -> None:
        """Hold everything from ``a`` to ``b``."""
        self._cut.add((a.name, b.name))
        self._watch(lambda c: {c.client, c.server} == {a, b})

    def heal(self, a: SimProcess, b: SimProcess) -> None:
        self._cut.discard((a.name, b.name))
        for connection in list(self.connections):
            if {connection.client, connection.server} == {a, b}:
                connection.flush()

    def slow(self, a: SimProcess, b: SimProcess, seconds: float) -> None:
        """Let each message from ``a`` to ``b`` take up to ``seconds`` longer; 0: no longer."""
        self._slow[a.name, b.name] = seconds

    def paused(self, process: SimProcess) -> None:
        """``process`` stands still: its peers give it up if it does so for long."""
        self._watch(lambda c: process in (c.client, c.server))

    def killed(self, process: SimProcess) -> None:
        """``process`` was killed: its host resets its connections."""
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                connection.lose(process)

    def connect(self, client: SimProcess, server: SimProcess) -> Connection:
        connection = Connection(self, client, server)
        self.connections.append(connection)
        cut = self.is_cut(client, server) or self.is_cut(server, client)
        if cut or not (client.runs and server.runs):
            self._watch(lambda c: c is connection)
        return connection

    def _watch(self, concerned: Callable[[Connection], bool]) -> None:
        for connection in self.connections:
            if concerned(connection):
                connection.watch()


class Stream:
    """One direction of a connection, with the queue of its reader."""

    def __init__(self, network: Network, source: SimProcess, target: SimProcess) -> None:
        self._network = network
        self.source = source
        self.target = target
        self._held: deque[tuple[Callable[..., None], int, object]] = deque()
        self._sent_again = 0  # held messages on their way: what was sent after them must not pass
        self._last = 0.0
        self.in_flight = 0  # bytes
        self.room: asyncio.Future[None] | None = None

    def send(self, size: int, deliver: Callable[..., None], value: object) -> None:
        """Call ``deliver(value)`` in the target when the message has come."""
        self.in_flight += size
        network = self._network
        latency = network.latency(self.source, self.target)
        self._last = max(self._last, network.loop.now + latency)
        network.loop.deliver_at(self._last, self.target, self._arrive, deliver, size, value)

    def _arrive(self, deliver: Callable[..., None], size: int, value: object) -> None:
        is_cut = self._network.is_cut(self.source, self.target)
        if self._held or self._sent_again or is_cut:
            self._held.append((deliver, size, value))
            return
        self._deliver(deliver, size, value)

    def _deliver(self, deliver: Callable[..., None], size: int, value: object) -> None:
        self.in_flight -= size
        if self.room is not None and not self.room.done() and self.in_flight < WINDOW_BYTES:
            self.room.set_result(None)
        deliver(value)

    def flush(self) -> None:
        """Send again what was held while the way was cut."""
        network, held, self._held = self._network, self._held, deque()
        for message in held:
            self._sent_again += 1
            self._last = max(
                self._last, network.loop.now + network.latency(self.source, self.target)
            )
            network.loop.deliver_at(self._last, self.target, self._arrive_again, *message)

    def _arrive_again(self, deliver: Callable[..., None], size: int, value: object) -> None:
        self._sent_again -= 1
        self._deliver(deliver, size, value)
        if not (self._sent_again or self._network.is_cut(self.source, self.target)):
            self.flush()

    async def wait_for_room(self) -> None:
        while self.in_flight >= WINDOW_BYTES:
            self.room = asyncio.get_running_loop().create_future()
            await self.room

    def release_writer(self) -> None:
        """Let a waiting writer go on, because the connection is over."""
        self.in_flight = -(1 << 60)
        if self.room is not None and not self.room.done():
            self.room.set_result(None)


class Connection:
    """A connection of two processes. ``on_lost`` has what each of them does when it is broken."""

    def __init__(self, network: Network, client: SimProcess, server: SimProcess) -> None:
        self._network = network
        self.client, self.server = client, server
        self.up = Stream(network, client, server)
        self.down = Stream(network, server, client)
        self.on_lost: dict[SimProcess, Callable[[str], None]] = {}
        self._over: set[SimProcess] = set()  # ends that know

    def _out(self, process: SimProcess) -> Stream:
        return self.up if process is self.client else self.down

    def flush(self) -> None:
        for stream in (self.up, self.down):
            if not self._network.is_cut(stream.source, stream.target):
                stream.flush()

    def close(self, process: SimProcess) -> None:
        """``process`` has no further use for the connection."""
        self._over.add(process)
        if len(self._over) == 2 and self in self._network.connections:
            self._network.connections.remove(self)

    def lose(self, process: SimProcess) -> None:
        """``process`` gives the connection up, or was killed; the other end is told, if a reset
        reaches it."""
        other = self.server if process is self.client else self.client
        if process not in self._over:
            self.close(process)
            if process.alive:
                process.run(self._tell, process, "keepalive watchdog timeout")
        self._out(process).send(0, lambda _: self._reset(other), None)

    def _reset(self, process: SimProcess) -> None:
        if process not in self._over:
            self.close(process)
            self._tell(process, "connection reset by peer")

    def _tell(self, process: SimProcess, why: str) -> None:
        self.up.release_writer()
        self.down.release_writer()
        if (on_lost := self.on_lost.get(process)) is not None:
            on_lost(why)

    def watch(self) -> None:
        """Give the connection up at each end that hears nothing of the other for so long."""
        for process, other in ((self.client, self.server), (self.server, self.client)):
            after = self._network.rng.uniform(*KEEPALIVE_S)
            self._network.loop.call_later(
                after, self._check, process, other, context=contextvars.Context()
            )

    def _is_mute(self, process: SimProcess, other: SimProcess) -> bool:
        cut = self._network.is_cut(process, other) or self._network.is_cut(other, process)
        return cut or not other.runs

    def _check(self, process: SimProcess, other: SimProcess) -> None:
        if process in self._over or not process.runs or not self._is_mute(process, other):
            return
        self.lose(process)
