"""The pairs of an engine process, between slots of its arena.

Nothing is loaded or started before a front opens the first pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.collectives.collective_thread import CollectiveThread
from engine.collectives.pair_groups import PairGroups
from engine.ipc.pair_messages import OpenPair, PairCommand, PairEvent

PAIR_LIMIT = 16
"""Pairs that an engine keeps open. Each has a socket here, and with NCCL device memory."""


class EnginePairs:
    """Takes the commands about pairs. The engine process creates and closes it; ``submit`` is
    called by one thread. ``slots`` [slots, slot_bytes] uint8 is the arena; ``send`` sends events
    and is called by any thread."""

    def __init__(self, slots: torch.Tensor, send: Callable[[Sequence[PairEvent]], None]) -> None:
        self._slots = slots
        self._send = send
        self._thread: CollectiveThread | None = None

    def submit(self, command: PairCommand) -> None:
        """Carry a command out, beside everything else. Commands before the first ``OpenPair`` are
        about pairs of an engine that has died, whose end the front knows."""
        if self._thread is None and isinstance(command, OpenPair):
            self._thread = self._start(command.host)
        if self._thread is not None:
            self._thread.submit(command)

    def close(self) -> None:
        """End the thread and all pairs. Idempotent."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _start(self, host: str) -> CollectiveThread:
        # The slots are in main memory, also those of an engine on a GPU.
        cpu = torch.device("cpu")
        groups = PairGroups("gloo", cpu, host, PAIR_LIMIT, lambda value: self._send([value]))
        return CollectiveThread(groups, self._slot, self._send)

    def _slot(self, slot: int, nbytes: int) -> torch.Tensor:
        count, slot_bytes = self._slots.shape
        if not (0 <= slot < count and 0 < nbytes <= slot_bytes):
            raise ValueError(f"{nbytes} bytes of slot {slot}: there are {count} of {slot_bytes}")
        return self._slots[slot, :nbytes]
