"""Two workers' ends of NIXL, with real movers and arenas, and without engines."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from cluster.local import die_with_parent
from engine.ipc.shared_memory import Arena, ArenaShape
from engine.process.session import EngineSession
from kvtransfer.carriers.nixl_carrier import MOVER_MODULE
from kvtransfer.nixl.messages import MoverAddress
from kvtransfer.nixl.mover_keeper import MoverKeeper
from kvtransfer.nixl.mover_process import MoverProcess, inbound_region, outbound_region
from kvtransfer.nixl.package import INSTALL_HINT, NixlPackage, find_nixl
from protocol.errors import TransferFailed

SHAPE = ArenaShape(slot_bytes=1 << 18, inbound=8, outbound=8)
TRANSPORTS = {"tcp": "tcp", "shm": "tcp,shm,self"}
"""UCX_TLS: ``shm`` needs ``tcp`` beside it, by which UCX notices that a process is gone."""


def package() -> NixlPackage:
    found = find_nixl()
    assert found is not None, f"{INSTALL_HINT} (make test does: make .venv/installed-nixl)"
    return found


def command() -> list[str]:
    """Return how movers are started: so that they die with this process."""
    wrapper = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
    return [*wrapper, sys.executable, "-m", MOVER_MODULE]


class FakeSession:
    """An engine session that has an arena and no engine."""

    def __init__(self, shape: ArenaShape = SHAPE) -> None:
        self.arena = Arena.create(shape)
        self.alive = True

    def end(self) -> None:
        self.alive = False
        self.arena.release_fd()

    def fill(self, slot: int, data: bytes) -> None:
        self.arena.slot(slot, len(data))[:] = data

    def content(self, slot: int, nbytes: int) -> bytes:
        return bytes(self.arena.slot(slot, nbytes))

    @property
    def engine(self) -> EngineSession:
        return cast(EngineSession, self)


class MoverPair:
    """The reading side of one worker and the serving side of another."""

    def __init__(self, transport: str) -> None:
        env = {**os.environ, "UCX_TLS": TRANSPORTS[transport], "UCX_NET_DEVICES": "lo"}
        argv = [*command(), package().module]
        self.reading, self.serving = FakeSession(), FakeSession()
        self.readers = MoverKeeper(argv, inbound_region, env)
        self.servers = MoverKeeper(argv, outbound_region, env)

    async def connect(self) -> tuple[MoverProcess, MoverAddress, int]:
        """Return the reader, the address of the server, and the reader's number for it."""
        async with asyncio.timeout(5):
            while not (self.readers.may_serve() and self.servers.may_serve()):
                await asyncio.sleep(0.05)
        server, reader = await asyncio.gather(
            self.servers.wait_ready(self.serving.engine),
            self.readers.wait_ready(self.reading.engine),
        )
        address = MoverAddress.decode(server.address().encode())
        return reader, address, await reader.peers.acquire(address)

    async def copy(self, data: bytes, into: int = 0) -> None:
        """Read ``data`` from a slot of the server into a slot of the reader."""
        slot = SHAPE.inbound  # the first one that is served
        self.serving.fill(slot, data)
        reader, address, peer = await self.connect()
        await reader.read(peer, address.locate(slot, len(data)), into, len(data))
        reader.peers.release(address)
        assert self.reading.content(into, len(data)) == data

    async def copy_again(self, data: bytes) -> None:
        """``copy`` after a failure. UCX may still end a server for it ("Endpoint timeout"), as it
        was seen to do in 1 of 15 kills of a reader over TCP: then another attempt succeeds."""
        for attempt in range(4):
            try:
                await self.copy(data)
                return
            except TransferFailed:
                if attempt == 3:
                    raise


@asynccontextmanager
async def mover_pair(transport: str) -> AsyncIterator[MoverPair]:
    """A pair of movers; afterwards no process of theirs is left."""
    before = open_descriptors()
    pair = MoverPair(transport)
    try:
        yield pair
    finally:
        await asyncio.gather(pair.readers.close(), pair.servers.close())
        pair.reading.end()
        pair.serving.end()
    assert not mover_processes(), "a mover is left"
    assert open_descriptors() == before


def open_descriptors() -> int:
    """Return how many sockets and processes are open here."""
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(link.startswith("socket:") or "pidfd" in link for link in links)


def pid(mover: MoverProcess) -> int:
    return int(cast(Any, mover)._process.pid)


def ignore_silence(mover: MoverProcess) -> None:
    """Let a mover stand still for as long as a test wants, as if its front stood still with it."""
    cast(Any, mover)._life.cancel()


def mover_processes() -> list[int]:
    """Return the processes whose command is a mover, started by this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid() and MOVER_MODULE in words:
            found.append(int(process.name))
    return found


async def serve_until_killed() -> None:
    """Be a front: start a mover, and print its process."""
    pair = MoverPair("tcp")
    print(pid(await pair.servers.wait_ready(pair.serving.engine)), flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(serve_until_killed())
