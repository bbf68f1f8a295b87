"""One mover as its front sees it: the child process, its socket, and the reads under way.

A mover ends for good when it dies, falls silent, or is killed because a read has failed. Every read
of it has failed then, and nothing of it writes to a slot once ``gone`` has returned.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.ipc.shared_memory import ArenaShape
from kvtransfer.nixl import messages as m
from kvtransfer.nixl.peers import PeerTable
from protocol.errors import CarrierFailed, TransferFailed
from protocol.liveness import SilenceDetector

log = logging.getLogger("baton.kv")

START_S = 20.0
"""Limit for loading the library and registering the region, some 0.3 s without load. A network
adapter pins every page of the region."""

SILENT_S = 2.0
"""A mover that says nothing for so long, four beats, hangs."""


GONE_S = 10.0
"""Limit for the end of a killed process. One that takes longer waits for its network adapter, whose
last answers came long before."""


class ArenaRegion(NamedTuple):
    """Slots of an arena that follow each other: all a mover has to know."""

    offset: int  # in the arena, whole pages
    bytes: int
    first_slot: int
    slots: int
    stride: int


def inbound_region(shape: ArenaShape) -> ArenaRegion:
    """Return the slots that this worker receives into."""
    return _region(shape, 0, shape.inbound)


def outbound_region(shape: ArenaShape) -> ArenaRegion:
    """Return the slots that other workers read."""
    return _region(shape, shape.inbound, shape.outbound)


def _region(shape: ArenaShape, first: int, slots: int) -> ArenaRegion:
    stride = shape.layout.stride
    return ArenaRegion(shape.layout.start(first), slots * stride, first, slots, stride)


class _Reading(NamedTuple):
    peer: int
    done: asyncio.Future[None]


class MoverProcess:
    """The connection to one mover. ``spawn_mover`` creates it, ``end`` kills the process. Event
    loop only."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, region: ArenaRegion
    ) -> None:
        self.region = region
        self.alive = True
        self.reads_done = 0
        self.peers = PeerTable(self._send)
        self._process = process
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[m.MoverReady] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._silence = SilenceDetector()
        self._numbers = itertools.count(1)
        self._reads: dict[int, _Reading] = {}
        self._outbox: deque[bytes] = deque()
        self._loop.add_reader(sock, self._receive)
        self._exit_fd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._exit_fd, self._exited)
        self._life = asyncio.create_task(self._live(), name="nixl-mover")

    # ---- life -------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Wait until the region is registered. Raises CarrierFailed."""
        await asyncio.shield(self._ready)

    async def _live(self) -> None:
        """End the process when it does not get ready, or falls silent later."""
        await asyncio.wait([self._ready], timeout=START_S)
        if not self._ready.done():
            self.end(f"the NIXL mover was not ready within {START_S:g} s")
        else:
            await self._silence.wait_for_silence(SILENT_S)
            self.end(f"the NIXL mover sent nothing for {SILENT_S:g} s")

    def is_ready(self) -> bool:
        return self.alive and self._ready.done()

    def end(self, why: str, culprit: int | None = None) -> None:
        """Kill the process; every read fails. Idempotent.

        The peer that is the ``culprit`` is at fault alone; without one the mover is, and with it
        the link to every peer."""
        if not self.alive:
            return
        self.alive = False
        log.info("the NIXL mover %d ends: %s", self._process.pid, why)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._process.kill()
        self._life.cancel()
        everyone = CarrierFailed(why)
        others = everyone if culprit is None else TransferFailed(f"NIXL was restarted: {why}")
        if not self._ready.done():
            self._ready.set_exception(everyone)
            self._ready.exception()
        reads, self._reads = self._reads, {}
        for reading in reads.values():
            _fail(reading.done, everyone if reading.peer == culprit else others)
        self.peers.on_lost(others)
        self._lost.set()

    async def lost_within(self, wait_s: float) -> bool:
        """Return whether this mover has ended, waiting up to ``wait_s`` for it."""
        losing = asyncio.create_task(self._lost.wait())
        await asyncio.wait([losing], timeout=wait_s)
        losing.cancel()
        return not self.alive

    async def gone(self) -> None:
        """Return when the process of an ended mover is no more: nothing writes to its slots."""
        await asyncio.wait([self._gone], timeout=GONE_S)
        if not self._gone.done():
            log.error("the NIXL mover %d was killed and is still there", self._process.pid)

    def _exited(self) -> None:
        self._loop.remove_reader(self._exit_fd)
        os.close(self._exit_fd)
        code = self._process.wait()
        self.end(f"the NIXL mover ended with status {code}")
        self._gone.set_result(None)

    # ---- traffic ----------------------------------------------------------------------------

    def address(self) -> m.MoverAddress:
        """Return where other movers find the slots of this region; the mover must be ready."""
        ready, region = self._ready.result(), self.region
        return m.MoverAddress(
            ready.token,
            ready.metadata,
            ready.probe,
            ready.region_at,
            region.first_slot,
            region.slots,
            region.stride,
        )

    async def read(self, peer: int, remote: int, slot: int, nbytes: int) -> None:
        """Read ``nbytes`` at ``remote`` of a peer's memory into a slot of the region.

        Raises CarrierFailed if the link is at fault, and TransferFailed if the mover was ended for
        the fault of another. The task must not be cancelled: the slot is in use until this
        returns, and after an error until ``gone`` does."""
        if not self.alive:
            raise TransferFailed("the NIXL mover has ended")
        index = slot - self.region.first_slot
        assert 0 <= index < self.region.slots and 0 < nbytes <= self.region.stride
        number = next(self._numbers)
        reading = self._reads[number] = _Reading(peer, self._loop.create_future())
        self._send(m.Read(number, peer, remote, index * self.region.stride, nbytes))
        await reading.done
        self.reads_done += 1

    def _send(self, command: m.MoverCommand) -> None:
        if not self.alive:
            return
        if not self._outbox:
            self._loop.add_writer(self._socket, self._flush)
        self._outbox.append(m.encode_packet(command))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                self._socket.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"the NIXL mover takes no messages: {error}")
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        while self.alive:
            try:
                packet = self._socket.recv(m.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            self._silence.heard()
            if packet:
                self._on_event(m.decode_event(packet))
            else:
                self.end("the NIXL mover ended")

    def _on_event(self, event: m.MoverEvent) -> None:
        if isinstance(event, m.ReadDone):
            self._reads.pop(event.read).done.set_result(None)
        elif isinstance(event, m.ReadRefused):
            _fail(self._reads.pop(event.read).done, CarrierFailed(f"NIXL: {event.why}"))
        elif isinstance(event, m.ReadFailed):
            self.end(f"a read by NIXL failed: {event.why}", self._reads[event.read].peer)
        elif isinstance(event, m.PeerAdded):
            self.peers.on_added(event.peer)
        elif isinstance(event, m.PeerFailed):
            self.peers.on_failed(event.peer, event.why)
        elif isinstance(event, m.MoverReady):
            self._ready.set_result(event)
        elif isinstance(event, m.MoverFailed):
            self.end(f"NIXL does not start: {event.why}")


def _fail(future: asyncio.Future[None], error: TransferFailed) -> None:
    if not future.done():
        future.set_exception(error)


def spawn_mover(
    command: Sequence[str], arena_fd: int, region: ArenaRegion, env: Mapping[str, str]
) -> MoverProcess:
    """Start a mover of the arena, with ``command`` and the numbers of what it inherits.

    Raises CarrierFailed if there is no such program."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    inherited = theirs.fileno(), arena_fd
    numbers = [*inherited, region.offset, region.bytes]
    try:
        process = subprocess.Popen(
            [*command, *map(str, numbers)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what the library says belongs to the log
            env=dict(env),
        )
    except OSError as error:
        ours.close()
        raise CarrierFailed(f"cannot start the NIXL mover: {error}") from error
    finally:
        theirs.close()
    return MoverProcess(process, ours, region)
