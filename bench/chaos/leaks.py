"""What a pool at rest still holds: memory, descriptors, threads, pages and jobs.

Asyncio tasks cannot be counted from outside; one that leaks holds memory, and as a rule a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import psutil

from bench.lib.standalone import Standalone
from protocol.registry.directory import WorkerRecord

REST_S = 15.0
"""Within this time after the last request everything must be given back."""

RSS_SLACK = 24.0
"""MiB that a process may grow after its first rounds: allocators keep some of what was freed."""

FDS_SLACK = 16
"""Idle connections that pools of connections keep, which come and go with the workers."""

THREADS_SLACK = 8
"""Executors start their threads when they are first needed."""

_COUNTS = b"decode_jobs|prefill_calls|kv_slots_held"
_JOBS = re.compile(rb"^baton_(" + _COUNTS + rb")\{[^}]*\} ([0-9.]+)$", re.MULTILINE)


class ProcessSize(NamedTuple):
    """One process at one moment of rest."""

    rss_mib: float
    fds: int
    threads: int


class ProcessHistory(NamedTuple):
    """One process over the soak, from its second moment of rest on."""

    name: str
    sizes: list[ProcessSize]

    def faults(self) -> list[str]:
        """Return what has grown beyond its slack. Needs four moments: fewer show no slope."""
        if len(self.sizes) < 4:
            return []
        first, last = self.sizes[0], _least(self.sizes[-2:])
        limits = (
            ("MiB resident", RSS_SLACK),
            ("descriptors", FDS_SLACK),
            ("threads", THREADS_SLACK),
        )
        return [
            f"{self.name}: {what} grew from {before:g} to {after:g}"
            for (what, slack), before, after in zip(limits, first, last, strict=True)
            if after > before + slack
        ]


def _least(sizes: Sequence[ProcessSize]) -> ProcessSize:
    """Return the least of each figure: what is held is held at every moment of rest."""
    return ProcessSize(*(min(values) for values in zip(*sizes, strict=True)))


class ProcessSizes:
    """Histories of all processes of a pool. The soak calls ``measure`` at each moment of rest."""

    def __init__(self, pool: Standalone) -> None:
        self._pool = pool
        self._seen: set[int] = set()
        self.histories: dict[int, ProcessHistory] = {}

    async def measure(self) -> None:
        """Measure every process that was there at the last moment of rest, too."""
        named = {p.pid: f"router {i}" for i, p in enumerate(self._pool.routers)}
        for record in await self._pool.records():
            named[record.pid] = f"{record.role} front {record.pid}"
            named[record.engine_pid] = f"{record.role} engine {record.engine_pid}"
        for pid, name in named.items():
            if pid in self._seen:
                with contextlib.suppress(psutil.Error):
                    history = self.histories.setdefault(pid, ProcessHistory(name, []))
                    history.sizes.append(_size(pid))
        self._seen = set(named)

    def faults(self) -> list[str]:
        return [fault for history in self.histories.values() for fault in history.faults()]


def _size(pid: int) -> ProcessSize:
    process = psutil.Process(pid)
    return ProcessSize(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())


async def left_over(pool: Standalone) -> list[str]:
    """Wait until the pool holds nothing, for REST_S at most; return what it still holds."""
    held: list[str] = []
    async with aiohttp.ClientSession() as session:
        for _ in range(int(REST_S / 0.5)):
            held = [text for r in await pool.records() for text in await _held(session, r)]
            if not held:
                break
            await asyncio.sleep(0.5)
    return held


async def _held(session: aiohttp.ClientSession, record: WorkerRecord) -> list[str]:
    """Return what one worker holds. Pages in the prefix cache count as free: they are evictable."""
    name = f"{record.role} {record.instance[:8]}"
    used = record.kv_tokens_total - record.kv_tokens_free
    held = {"running": record.running, "waiting": record.waiting, "KV tokens in pages": used}
    if record.metrics_endpoint:
        async with session.get(f"http://{record.metrics_endpoint}/metrics") as response:
            page = await response.read()
        counts = {kind.decode(): int(float(count)) for kind, count in _JOBS.findall(page)}
        assert len(counts) == len(_COUNTS.split(b"|")), f"{name} reports {list(counts)} alone"
        held |= counts
    return [f"{name}: {count} {what}" for what, count in held.items() if count]
