"""The mover process: obeys its front, and calls NIXL.

    python -m kvtransfer.nixl.mover MODULE SOCKET_FD ARENA_FD OFFSET BYTES

MODULE is the package to load. The region is BYTES of the arena from OFFSET on, whole pages. The
process ends when its front closes the socket, or kills it; one that hangs in the library is killed
by its front, or by the kernel when the front is gone (the front starts it so).
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from kvtransfer.nixl import messages as m
from kvtransfer.nixl.agent import NixlAgent, NixlError, OwnMemory, address_of
from kvtransfer.nixl.stalls import PeerProgress

PROBE_S = 1.5
"""Limit for the first read of a peer: its token."""

STUCK_S = 3.0
"""A read is stuck when no read from its peer has ended for so long."""

_CHECK_S = 0.0002
"""Between two looks at the reads under way."""


class FrontGone(Exception):
    """The front has closed the socket."""


class FrontLink:
    """The mover's end of the socket. It blocks when the front does not read."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, event: m.MoverEvent) -> None:
        try:
            self._socket.sendall(m.encode_packet(event))
        except ConnectionError as error:
            raise FrontGone from error

    def receive(self, wait_s: float) -> list[m.MoverCommand]:
        """Return the commands that have come, waiting up to ``wait_s`` for the first one."""
        commands: list[m.MoverCommand] = []
        if not self._poll.poll(1000 * wait_s):
            return commands
        while True:
            try:
                packet = self._socket.recv(m.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            except ConnectionError as error:
                raise FrontGone from error
            if not packet:
                raise FrontGone
            commands.append(m.decode_command(packet))


class _Peer(NamedTuple):
    name: bytes
    progress: PeerProgress


class _Probe(NamedTuple):
    command: m.AddPeer
    handle: Any
    cell: int
    until: float


class _Reading(NamedTuple):
    handle: Any
    peer: int


class Mover:
    """The reads and peers of one mover. ``run`` returns when the front is gone."""

    def __init__(self, front: FrontLink, agent: NixlAgent, own: OwnMemory, region_at: int) -> None:
        self._front = front
        self._agent = agent
        self._own = own
        self._region_at = region_at
        self._peers: dict[int, _Peer] = {}
        self._probes: dict[int, _Probe] = {}
        self._reads: dict[int, _Reading] = {}
        self._beat_at = 0.0

    def run(self) -> None:
        try:
            while True:
                busy = bool(self._reads or self._probes)
                for command in self._front.receive(_CHECK_S if busy else m.BEAT_S):
                    self._obey(command)
                self._check_probes()
                self._check_reads()
                self._beat()
        except FrontGone:
            return

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= m.BEAT_S:
            self._beat_at = now
            self._front.send(m.MoverBeat())

    def _obey(self, command: m.MoverCommand) -> None:
        if isinstance(command, m.Read):
            self._begin_read(command)
        elif isinstance(command, m.AddPeer):
            self._begin_probe(command)
        else:
            self._forget(self._peers.pop(command.peer).name)

    # ---- peers ------------------------------------------------------------------------------

    def _begin_probe(self, command: m.AddPeer) -> None:
        cell = self._own.next_cell()
        name = _agent_name(command.token)
        try:
            if self._agent.add_peer(command.metadata) != name:
                raise NixlError("the metadata are those of another mover than its token")
            handle = self._agent.prepare_read(
                name, command.probe, self._own.at + cell, m.TOKEN_BYTES
            )
            self._agent.begin(handle)
        except NixlError as error:
            self._forget(name)  # the library keeps what it has understood of the metadata
            self._front.send(m.PeerFailed(command.peer, str(error)))
            return
        until = time.monotonic() + PROBE_S
        self._probes[command.peer] = _Probe(command, handle, cell, until)

    def _check_probes(self) -> None:
        for peer, probe in list(self._probes.items()):
            try:
                if not self._agent.check(probe.handle):
                    if time.monotonic() < probe.until:
                        continue
                    raise NixlError(f"it did not answer for {PROBE_S:g} s")
                if self._own.token_in(probe.cell) != probe.command.token:
                    raise NixlError("another process answered in its place")
                self._agent.release(probe.handle)
            except NixlError as error:
                self._forget(_agent_name(probe.command.token))
                self._front.send(m.PeerFailed(peer, str(error)))
            else:
                self._peers[peer] = _Peer(_agent_name(probe.command.token), PeerProgress())
                self._front.send(m.PeerAdded(peer))
            del self._probes[peer]

    def _forget(self, name: bytes) -> None:
        try:
            self._agent.forget_peer(name)
        except NixlError:
            return  # it was not known

    # ---- reads ------------------------------------------------------------------------------

    def _begin_read(self, command: m.Read) -> None:
        peer = self._peers[command.peer]
        local = self._region_at + command.local
        try:
            handle = self._agent.prepare_read(peer.name, command.remote, local, command.nbytes)
        except NixlError as error:
            self._front.send(m.ReadRefused(command.read, str(error)))
            return
        try:
            self._agent.begin(handle)
        except NixlError as error:
            self._front.send(m.ReadFailed(command.read, str(error)))
            return
        self._reads[command.read] = _Reading(handle, command.peer)
        peer.progress.began(command.read, time.monotonic())

    def _check_reads(self) -> None:
        for read, reading in list(self._reads.items()):
            progress = self._peers[reading.peer].progress
            try:
                if not self._agent.check(reading.handle):
                    continue
                self._agent.release(reading.handle)
            except NixlError as error:
                self._front.send(m.ReadFailed(read, str(error)))
            else:
                self._front.send(m.ReadDone(read))
            progress.ended(read, time.monotonic())
            del self._reads[read]
        now = time.monotonic()
        for peer in {reading.peer for reading in self._reads.values()}:
            stuck = self._peers[peer].progress.stuck(now, STUCK_S)
            if stuck is not None:
                why = f"the other worker's memory could not be read for {STUCK_S:g} s"
                self._front.send(m.ReadFailed(stuck, why))
                self._peers[peer].progress.ended(stuck, now)  # once: the front ends this process
                del self._reads[stuck]


def _agent_name(token: bytes) -> bytes:
    return token.hex().encode()


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front handles Ctrl-C
    module = argv[0]
    socket_fd, arena_fd, offset, nbytes = map(int, argv[1:])
    front = FrontLink(socket_fd)
    token = secrets.token_bytes(m.TOKEN_BYTES)
    try:
        region = mmap.mmap(arena_fd, nbytes, offset=offset)
        os.close(arena_fd)
        own = OwnMemory(token)
        region_at = address_of(region)
        agent = NixlAgent(module, _agent_name(token).decode())
        agent.register(own.at, mmap.PAGESIZE)
        agent.register(region_at, nbytes)
        ready = m.MoverReady(token, agent.metadata(), own.at, region_at)
    except (NixlError, ImportError, OSError) as error:
        front.send(m.MoverFailed(f"{type(error).__name__}: {error}"))
        return
    front.send(ready)
    Mover(front, agent, own, region_at).run()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # the library's own clean-up may hang, and the kernel's does not
