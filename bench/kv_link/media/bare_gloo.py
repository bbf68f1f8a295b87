"""Bare gloo: ``torch.distributed`` send and recv of one tensor on loopback."""

from __future__ import annotations

import datetime
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bench.kv_link.media.memory import digest, make_buffer

WAIT = datetime.timedelta(seconds=30)


class GlooEnd:
    """Rank 0 sends and rank 1 receives; one byte back ends a run."""

    def __init__(self, sending: bool) -> None:
        self._sending = sending
        self._buffer = make_buffer(sending)
        self._data = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._done = torch.zeros(1, dtype=torch.uint8)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, options: dict[str, Any]) -> str:
        """The ranks meet in a file of the sender's."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not self._sending:
            return ""
        self._folder = tempfile.TemporaryDirectory(prefix="bench-gloo-")
        self._meeting = str(Path(self._folder.name) / "ranks")
        return self._meeting

    def connect(self, other: str) -> None:
        store = FileStore(self._meeting if self._sending else other, 2)
        store.set_timeout(WAIT)
        rank = 0 if self._sending else 1
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
        dist.barrier()

    def run(self, job: dict[str, Any]) -> None:
        data = self._data[: job["bytes"]]
        if self._sending:
            dist.send(data, 1)
            dist.recv(self._done, 1)
        else:
            dist.recv(data, 0)
            dist.send(self._done, 0)

    def digest(self, job: dict[str, Any]) -> int:
        return digest(self._buffer[: job["bytes"]])

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()
