"""Process groups of two ranks, each made when its pair first has something to send.

    prepare --store--> open --group--> send, receive --> close
                        |                  `--failed or overdue--> aborted, forgotten
                        `--too many pairs--> the least recently used idle one is closed
                        `--pairs of the other rank--> closed, if all are idle

A pair of NCCL ranks costs 50 to 100 MB of device memory, hence the limit. All pairs of an engine
have the same rank at a time, so that an engine either sends or receives (``CollectiveThread`` says
why). The backend is a parameter: ``gloo`` between tensors in main memory, ``nccl`` between tensors
of two GPUs.

No operation can be cancelled. With gloo the deadline of ``Work.wait`` ends it, or the end of the
other process; both close the connection, which the other end notices at once. With NCCL the
deadline ends the wait, and the abort of the communicator ends the kernel.

Both ends trust each other: neither backend encrypts or authenticates, and a gloo receiver ends its
process when a message is longer than what it expects. Pairs are for a trusted network.

``CollectiveThread`` owns a ``PairGroups``. Only ``prepare``, ``deliver`` and ``cancel`` are called
on other threads.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import distributed

from engine.collectives.pair_store import PairStore
from engine.ipc.pair_messages import PairValue
from protocol.errors import CarrierFailed

PairBackend: TypeAlias = Literal["gloo", "nccl"]

OPEN_S = 3.0
"""Limit for the other end's answer, and then for the connection to it."""

_ATTEMPTS = 5  # that gloo makes to connect: a stopped process ends each by its deadline only


class PairWork(Protocol):
    """One operation of a group."""

    def wait(self, timeout: timedelta) -> bool: ...


class PairGroup(Protocol):
    """A process group of two ranks."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> PairWork: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> PairWork: ...

    def abort(self) -> None: ...


class _Pair:
    def __init__(self, group: PairGroup, rank: int) -> None:
        self.group = group
        self.peer = 1 - rank
        self.sent = self.received = 0  # operations; gloo matches by them, NCCL by order


class PairGroups:
    """The pairs of one engine. ``publish`` is called with every value for the other end of a pair,
    on any thread; gloo listens on ``host``."""

    def __init__(
        self,
        backend: PairBackend,
        device: torch.device,
        host: str,
        limit: int,
        publish: Callable[[PairValue], None],
    ) -> None:
        if backend == "nccl" and not distributed.is_nccl_available():
            raise CarrierFailed("this build of torch has no NCCL: use a build for CUDA")
        self._backend = backend
        self._device = device
        self._host = host
        self._limit = limit
        self._publish = publish
        self._listener: Any = None  # of gloo; it has one thread for all pairs
        self._pairs: OrderedDict[str, _Pair] = OrderedDict()  # the least recently used first
        self._stores: dict[str, PairStore] = {}
        self._lock = threading.Lock()  # of ``_stores``

    # ---- any thread --------------------------------------------------------------------------

    def prepare(self, pair: str) -> None:
        """Keep values of the other end for ``pair``, which is going to be opened."""
        with self._lock:
            self._stores[pair] = PairStore(pair, self._publish, OPEN_S)

    def deliver(self, value: PairValue) -> None:
        """Pass on a value of the other end. It is ignored if the pair is unknown."""
        with self._lock:
            store = self._stores.get(value.pair)
        if store is not None:
            store.deliver(value.key, value.value)

    def cancel(self, pair: str) -> None:
        """End ``open`` of this pair early."""
        with self._lock:
            store = self._stores.get(pair)
        if store is not None:
            store.cancel()

    # ---- collective thread -------------------------------------------------------------------

    def open(self, pair: str, rank: int, in_use: Collection[str] = ()) -> list[str]:
        """Connect a prepared pair as ``rank``. Return the pairs that were closed for it, none of
        which is in ``in_use``. Raise CarrierFailed."""
        with self._lock:
            store = self._stores.get(pair)
        if store is None:
            raise CarrierFailed(f"pair {pair} was closed before it could be connected")
        try:
            dropped = self._make_room(rank, in_use)
            group = self._make_group(store, rank)
        except Exception as error:  # torch and gloo raise various types
            self.close(pair)
            raise CarrierFailed(f"pair {pair} could not be connected: {_reason(error)}") from error
        self._pairs[pair] = _Pair(group, rank)
        return dropped

    def send(self, pair: str, data: torch.Tensor, timeout_s: float) -> None:
        """Send a contiguous tensor [bytes] on this backend's device.

        Raise CarrierFailed; the pair is closed then."""
        entry = self._use(pair)
        entry.sent += 1
        self._run(pair, lambda: entry.group.send([data], entry.peer, entry.sent), timeout_s)

    def receive(self, pair: str, data: torch.Tensor, timeout_s: float) -> None:
        """Receive a tensor [bytes] of the size that the other end sends.

        Raise CarrierFailed; the pair is closed then, and ``data`` is written no more."""
        entry = self._use(pair)
        entry.received += 1
        self._run(pair, lambda: entry.group.recv([data], entry.peer, entry.received), timeout_s)

    def close(self, pair: str) -> None:
        """Abort and forget a pair, in any state."""
        with self._lock:
            self._stores.pop(pair, None)
        if (entry := self._pairs.pop(pair, None)) is not None:
            entry.group.abort()

    def close_all(self) -> None:
        for pair in [*self._pairs, *self._stores]:
            self.close(pair)
        self._listener = None

    def __contains__(self, pair: str) -> bool:
        return pair in self._pairs

    def _use(self, pair: str) -> _Pair:
        if pair not in self._pairs:
            raise CarrierFailed(f"pair {pair} is not open")
        self._pairs.move_to_end(pair)
        return self._pairs[pair]

    def _run(self, pair: str, start: Callable[[], PairWork], timeout_s: float) -> None:
        try:
            start().wait(timedelta(seconds=timeout_s))
        except Exception as error:  # torch and gloo raise various types
            self.close(pair)
            raise CarrierFailed(f"pair {pair} failed: {_reason(error)}") from error

    def _make_room(self, rank: int, in_use: Collection[str]) -> list[str]:
        """Close the pairs of the other rank, and the least recently used one of too many."""
        drop = [pair for pair, entry in self._pairs.items() if entry.peer == rank]
        if len(self._pairs) - len(drop) >= self._limit:
            idle = (pair for pair in self._pairs if pair not in in_use and pair not in drop)
            if (oldest := next(idle, None)) is None:
                raise CarrierFailed(f"all {self._limit} pairs of this engine are in use")
            drop.append(oldest)
        if any(pair in in_use for pair in drop):
            raise CarrierFailed("this engine cannot send and receive by pairs at the same time")
        for pair in drop:
            self.close(pair)
        return drop

    def _make_group(self, store: PairStore, rank: int) -> PairGroup:
        if self._backend == "gloo":
            return self._make_gloo_group(store, rank)
        return self._make_nccl_group(store, rank)

    def _make_gloo_group(self, store: PairStore, rank: int) -> PairGroup:
        gloo: Any = distributed.ProcessGroupGloo
        if self._listener is None:
            self._listener = gloo.create_device(hostname=self._host)
        options = gloo._Options()
        options._devices = [self._listener]
        options._timeout = timedelta(seconds=OPEN_S / _ATTEMPTS)
        options._threads = 1  # for collectives, which pairs do not use
        group: PairGroup = gloo(store, rank, 2, options)
        return group

    def _make_nccl_group(self, store: PairStore, rank: int) -> PairGroup:
        """Connect through NCCL. Its watchdog must not end the process after a failure, because the
        deadlines here are shorter and a failed pair is aborted here."""
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=10 * OPEN_S)
        group = nccl(store, rank, 2, options)
        probe = torch.zeros(8, dtype=torch.uint8, device=self._device)
        operation = group.send if rank == 0 else group.recv
        operation([probe], 1 - rank, 0).wait(timedelta(seconds=OPEN_S))  # makes the communicator
        connected: PairGroup = group
        return connected


def _reason(error: Exception) -> str:
    """Return the first line of an error: torch and gloo append stack traces."""
    return (str(error).splitlines() or [repr(error)])[0]
