"""The contestants of one run: pairs of processes, and what each of them moves."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.kv_link.media.memory import MIB
from bench.kv_link.pairs import LinkPair, LinkRun
from bench.kv_link.product.pool_engine import PAYLOAD
from cluster.credentials import certificates

BARE: Final = ("memcpy", "socket", "gloo", "bare grpc")
TLS_SOCKET: Final = "socket, TLS"
NIXL: Final = {"NIXL tcp": "tcp", "NIXL shm": "tcp,sm"}
"""UCX_TLS of each contestant. UCX needs a network transport beside shared memory to connect."""

MEDIUM: Final = {
    "local": "memcpy",
    "tcp": "socket",
    "nccl": "gloo",
    "nixl": "socket",
    "grpc": "bare grpc",
}
"""The bare medium of each carrier."""

ENCRYPTED: Final = ("tcp", "grpc")
"""The carriers that TLS changes."""

OPTIONAL: Final = ("nixl", "nccl")
"""Carriers that are not there on every machine."""

SERVE_S = 10.0

PEER: Final = {"local": "NIXL shm", "tcp": "NIXL tcp", "nixl": "NIXL tcp"}
"""Who moves bytes on the same medium, and is installed or not."""


class LinkContestant(msgspec.Struct, frozen=True):
    """One way to move bytes."""

    name: str
    end: str  # at both processes of the pair
    carrier: str = ""  # of the product; empty: a bare medium or NIXL
    shape: str = ""
    tls: bool = False
    has_engine: bool = False  # KV comes from a pool and goes to one

    @property
    def medium(self) -> str:
        """Name of the bare contestant to compare with; empty: none."""
        if self.tls:
            return TLS_SOCKET if self.carrier == "tcp" else ""
        return MEDIUM.get(self.carrier, "")

    @property
    def peer(self) -> str:
        return "" if self.tls else PEER.get(self.carrier, "")


class LinkField:
    """All contestants. ``close`` ends every process."""

    def __init__(self) -> None:
        self.contestants: list[LinkContestant] = []
        self.left_out: list[str] = []  # why, one line each
        self._pairs: dict[str, LinkPair] = {}  # by end
        self._stack = contextlib.ExitStack()

    def open(self, shapes: Sequence[str], *, tls: bool, nixl_python: Path | None) -> None:
        """Start all contestants. Raises RuntimeError when one of ours cannot start."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        files = make_tls_files(folder)
        tasks: list[Callable[[], list[LinkContestant]]] = []
        tasks.append(partial(self._open_bare, files if tls else None))
        tasks += [partial(self._open_product, shape, None) for shape in shapes]
        if tls:
            tasks.append(partial(self._open_product, shapes[0], files))
        if nixl_python is None:
            self.left_out.append("NIXL: no --nixl-python was given")
        else:
            tasks += [partial(self._open_nixl, name, nixl_python) for name in NIXL]
        # The kernel ends a child when the thread that started it ends, so the threads stay.
        threads = self._stack.enter_context(ThreadPoolExecutor(len(tasks)))
        opened = [threads.submit(task) for task in tasks]
        wait(opened)  # so that ``close`` knows every pair
        for future in opened:
            self.contestants += future.result()

    def _start(self, *arguments: Any, **options: Any) -> LinkPair:
        pair = LinkPair(*arguments, **options)
        self._stack.callback(pair.close)
        return pair

    def _open_bare(self, tls_files: dict[str, str] | None) -> list[LinkContestant]:
        pair = self._start()
        media = {"memcpy": "memcpy", "socket": "socket", "gloo": "gloo", "bare grpc": "grpc"}
        for name in BARE:
            pair.open(name, media[name])
            self._pairs[name] = pair
        found = [LinkContestant(name, name) for name in BARE]
        if tls_files is not None:
            pair.open(TLS_SOCKET, "socket+tls", tls_files)
            self._pairs[TLS_SOCKET] = pair
            found.append(LinkContestant(TLS_SOCKET, TLS_SOCKET, tls=True))
        return found

    def _open_nixl(self, name: str, python: Path) -> list[LinkContestant]:
        try:
            pair = self._start(python, {"UCX_TLS": NIXL[name]}, stopped_between=True)
            pair.open(name, "nixl")
        except (OSError, RuntimeError) as error:
            self.left_out.append(f"{name}: {error}")
            return []
        self._pairs[name] = pair
        return [LinkContestant(name, name)]

    def _open_product(self, shape: str, tls_files: dict[str, str] | None) -> list[LinkContestant]:
        """Open both ends of the product without engines, and with engines unless there is TLS,
        which changes nothing for them."""
        pair, tls, found = self._start(), tls_files is not None, []
        for has_engine in (False,) if tls else (False, True):
            end = f"{shape}{', TLS' if tls else ''}{', pools' if has_engine else ''}"
            options = {"shape": shape, "tls": tls_files, "engine": has_engine}
            opened = pair.open(end, "product", options, receiver_starts=True)
            self._pairs[end] = pair
            found += [
                LinkContestant(f"{carrier} {end}", end, carrier, shape, tls, has_engine)
                for carrier in opened["carriers"]
                if not tls or carrier in ENCRYPTED
            ]
        return [contestant for contestant in found if self._serves(contestant)]

    def _serves(self, contestant: LinkContestant) -> bool:
        """Return whether a carrier is of use here. Those that need more than this machine may have
        are given SERVE_S to start; others must work at once when they are measured."""
        if contestant.carrier not in OPTIONAL:
            return True
        deadline = time.monotonic() + SERVE_S
        while True:
            try:
                self.run(contestant, MIB)
            except RuntimeError as error:
                if (unusable := "offered were none" in str(error)) or time.monotonic() > deadline:
                    why = "this machine has not what it needs" if unusable else str(error)
                    self.left_out.append(f"{contestant.name}: {why}")
                    return False
                time.sleep(0.2)
            else:
                return True

    def run(
        self,
        contestant: LinkContestant,
        nbytes: int,
        mode: str = PAYLOAD,
        codec: str = "raw",
        **more: Any,
    ) -> LinkRun:
        """Move about ``nbytes`` bytes once. Raises RuntimeError."""
        options = {"carrier": contestant.carrier, "mode": mode, "codec": codec, **more}
        pair = self._pairs[contestant.end]
        return pair.run(contestant.end, nbytes, **(options if contestant.carrier else {}))

    @property
    def without_engines(self) -> list[LinkContestant]:
        return [c for c in self.contestants if not c.has_engine]

    @property
    def with_engines(self) -> list[LinkContestant]:
        return [c for c in self.contestants if c.has_engine]

    def check(self, contestant: LinkContestant, nbytes: int) -> None:
        """Raise RuntimeError unless the receiver has the bytes of the sender after a bare run."""
        self._pairs[contestant.end].check(contestant.end, nbytes)

    def close(self) -> None:
        self._stack.close()


def make_tls_files(folder: Path) -> dict[str, str]:
    """Create a CA and a certificate of localhost. Return the fields of ``TlsFiles``."""
    certificates.create_ca(folder, [])
    names = {"ca": "ca.pem", "cert": "localhost.pem", "key": "localhost.key"}
    return {field: str(folder / name) for field, name in names.items()}
