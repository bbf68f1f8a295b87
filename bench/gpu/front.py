"""The front of an engine process without a worker: one socket, one arena, no Ray, Redis or gRPC.

``EngineFront`` starts bench.gpu.random_engine, whose weights are random, and opens sequences as
decode_worker and prefill_worker do. ``hand_over`` stands for kvtransfer: it copies each frame from
the slot of one arena to a slot of the other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.gpu.random_engine import STAMPS, read_stamps
from engine.ipc import messages as m
from engine.ipc.settings import EngineSettings, MachineCeilings, SpeculationSettings
from engine.process.session import EngineSession, spawn_engine
from protocol.errors import EngineDied
from protocol.requests import Finish, Logprobs, Request
from protocol.roles import Role

E = TypeVar("E")
START_S = 150.0
ANSWER_S = 60.0
ENGINE = [sys.executable, "-m", "bench.gpu.random_engine"]


class SequenceEvents:
    """The events of one sequence, and the times of its tokens on time.monotonic."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._queue: asyncio.Queue[m.Event | None] = asyncio.Queue()
        self._drawn = asyncio.Event()

    def on_event(self, event: m.Event) -> None:
        """Queue an event for ``wait``, unless it only says how far a prefill is."""
        if not isinstance(event, m.Computed):
            self._queue.put_nowait(event)

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        """Note a token."""
        self.tokens.append(token)
        self.times.append(time.monotonic())
        self._drawn.set()

    def on_lost(self) -> None:
        """Wake up what waits, which finds that the engine is gone."""
        self._queue.put_nowait(None)
        self._drawn.set()

    async def wait(self, kind: type[E]) -> E:
        """Return the next event of a type; others that come before it are an error."""
        event = await asyncio.wait_for(self._queue.get(), ANSWER_S)
        if not isinstance(event, kind):
            raise EngineDied(f"expected {kind.__name__} from the engine, got {event}")
        return event

    async def wait_for_token(self) -> float:
        """Return the time of the first token."""
        await asyncio.wait_for(self._drawn.wait(), ANSWER_S)
        if not self.times:
            raise EngineDied("the engine ended before it drew a token")
        return self.times[0]


def front_settings(folder: Path, role: Role, device: str, **changes: Any) -> EngineSettings:
    """Return the settings of an engine with fp8 KV and without speculation."""
    left_to_engine = {
        field.name: None for field in msgspec.structs.fields(EngineSettings) if field.required
    }
    settings: dict[str, Any] = {
        **left_to_engine,
        "model_path": str(folder),
        "role": role,
        "device": device,
        "threads": 1,
        "kv_storage": "fp8",
        "kv_precision": "fp8",
        "step_budget_ms": 0.0,
        "batch_invariant": False,
        "speculation": SpeculationSettings(method="off", model_path=None, max_tokens=1),
        "ceilings": MachineCeilings(flops=1.0, bytes=1.0),  # declared, so that none is measured
    }
    return EngineSettings(**{**settings, **changes})


class EngineFront:
    """One engine process. Create it in a running event loop, ``open`` it, and ``close`` it."""

    def __init__(self, settings: EngineSettings) -> None:
        self._handles = itertools.count(1)
        stamps, self._stamps = tempfile.mkstemp()
        os.close(stamps)
        os.environ[STAMPS] = self._stamps
        self.session: EngineSession = spawn_engine(ENGINE, settings)
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> m.EngineReady:
        """Wait until the engine is loaded."""
        async with asyncio.timeout(START_S):
            ready = await self.session.open(lambda _what, _fraction: None)
        self._listening = asyncio.create_task(self.session.listen())
        self._listening.add_done_callback(lambda _: self.session.end())  # tells every sequence
        return ready

    def close(self) -> None:
        """Kill the process."""
        if self._listening is not None:
            self._listening.cancel()
        self.session.end()
        Path(self._stamps).unlink(missing_ok=True)

    def sequence(self) -> tuple[int, SequenceEvents]:
        """Return a new handle, and what happens to its sequence."""
        handle, events = next(self._handles), SequenceEvents()
        self.session.attach(handle, events)
        return handle, events

    async def receive(self, request: Request) -> tuple[int, SequenceEvents]:
        """Open a sequence whose KV comes from elsewhere; its pages are allocated on return."""
        handle, events = self.sequence()
        self.session.send(m.Receive(handle, request))
        await events.wait(m.PrefixFound)
        self.session.send(m.Reserve(handle))
        await events.wait(m.Reserved)
        return handle, events

    async def decode_without_kv(self, request: Request) -> SequenceEvents:
        """Let a sequence decode over whatever its pages hold."""
        handle, events = await self.receive(request)
        self.session.send(m.Join(handle, 3, 0))
        await events.wait(m.Joined)
        return events

    def drop(self, handle: int) -> None:
        """Forget a sequence in the engine and here."""
        self.session.send(m.Drop(handle))
        self.session.detach(handle)

    async def free_slot(self) -> int:
        """Return an inbound slot, waiting for one where all are under way."""
        while not self.session.inbound:
            freed = asyncio.Event()
            self.session.on_inbound_free = freed.set
            await asyncio.wait_for(freed.wait(), ANSWER_S)
        return self.session.inbound.pop()

    def step_ends(self, since: float, until: float) -> list[float]:
        """Return when steps ended in the engine process (time.monotonic), within a period."""
        return [at for at in read_stamps(Path(self._stamps)) if since <= at <= until]


def write_folder(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write a model folder without weights to ``folder``, and return it."""
    (folder / "config.json").write_text(json.dumps(dict(shape)))
    return folder
