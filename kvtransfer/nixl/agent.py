"""NIXL's agent, with the few calls that a mover needs. Used in the mover's process alone.

The bindings are called directly. The package's own Python layer passes descriptors as pickles; here
positions travel as plain numbers.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
from collections.abc import Callable
from typing import Any, TypeVar

from kvtransfer.nixl.messages import TOKEN_BYTES

_BACKEND = "UCX"

_IDLE_POLL_US = 20_000
"""How often the library's progress thread looks around if no event wakes it. With 0 it would spin,
which costs a core for each mover."""

_CELL_BYTES = 64

T = TypeVar("T")


class NixlError(Exception):
    """A call of the library failed."""


class OwnMemory:
    """A page of the mover's own: its token, which others read to see that they have reached this
    mover, and cells into which it reads their tokens."""

    def __init__(self, token: bytes) -> None:
        assert len(token) == TOKEN_BYTES
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page[:TOKEN_BYTES] = token
        self.at = address_of(self._page)
        self._next = 0

    def next_cell(self) -> int:
        """Return the offset of a cell, zeroed. Cells are used in turn."""
        cells = mmap.PAGESIZE // _CELL_BYTES - 1
        offset = _CELL_BYTES * (1 + self._next % cells)
        self._next += 1
        self._page[offset : offset + TOKEN_BYTES] = bytes(TOKEN_BYTES)
        return offset

    def token_in(self, cell: int) -> bytes:
        return self._page[cell : cell + TOKEN_BYTES]


def address_of(memory: mmap.mmap) -> int:
    """Return where a writable mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class NixlAgent:
    """One agent with the UCX backend. Errors of all methods are NixlError."""

    def __init__(self, module: str, name: str) -> None:
        self._library: Any = importlib.import_module(f"{module}._bindings")
        config = self._library.nixlAgentConfig()
        config.useProgThread = True  # others read from here without this process knowing
        config.pthrDelay = _IDLE_POLL_US
        config.useListenThread = False
        config.syncMode = self._library.NIXL_THREAD_SYNC_NONE  # one thread calls
        self._agent = _call(lambda: self._library.nixlAgent(name, config))
        self._backend = [_call(lambda: self._agent.createBackend(_BACKEND, {}))]

    def register(self, at: int, nbytes: int) -> None:
        """Make memory known, for transfers to it and from it."""
        kind = self._library.DRAM_SEG
        regions = self._library.nixlRegDList(kind, [(at, nbytes, 0, "")])
        _call(lambda: self._agent.registerMem(regions, self._backend))

    def metadata(self) -> bytes:
        """Return what others need to read the memory registered so far."""
        return bytes(_call(self._agent.getLocalMD))

    def add_peer(self, metadata: bytes) -> bytes:
        """Load another agent's metadata, and return its name."""
        return bytes(_call(lambda: self._agent.loadRemoteMD(metadata)))

    def forget_peer(self, name: bytes) -> None:
        _call(lambda: self._agent.invalidateRemoteMD(name.decode()))

    def prepare_read(self, name: bytes, remote: int, local: int, nbytes: int) -> Any:
        """Return a handle of a read that has not begun. NixlError if either place is not
        registered."""
        kind = self._library.DRAM_SEG
        here = self._library.nixlXferDList(kind, [(local, nbytes, 0)])
        there = self._library.nixlXferDList(kind, [(remote, nbytes, 0)])
        read = self._library.NIXL_READ
        return _call(
            lambda: self._agent.createXferReq(read, here, there, name.decode(), b"", self._backend)
        )

    def begin(self, handle: Any) -> bool:
        """Begin a prepared read; return whether it is done already."""
        return self._is_done(_call(lambda: self._agent.postXferReq(handle, b"")))

    def check(self, handle: Any) -> bool:
        """Return whether a read is done."""
        return self._is_done(_call(lambda: self._agent.getXferStatus(handle)))

    def release(self, handle: Any) -> None:
        """Forget a handle of a read that is done or has not begun."""
        _call(lambda: self._agent.releaseXferReq(handle))

    def _is_done(self, status: Any) -> bool:
        if status == self._library.NIXL_SUCCESS:
            return True
        if status == self._library.NIXL_IN_PROG:
            return False
        raise NixlError(str(status))


def _call(function: Callable[[], T]) -> T:
    # The library raises classes of its own without a common base other than Exception.
    try:
        return function()
    except Exception as error:
        raise NixlError(f"{type(error).__name__}: {error}") from error
