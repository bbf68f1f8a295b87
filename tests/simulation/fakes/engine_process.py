"""An engine process: the real ``EngineServer`` and copy thread on the toy model, turn by turn.

    front --commands--> EngineEnd --> EngineServer.turn --> events --> front      (the step loop)
    front --slot commands--> SlotEnd --> CopyThread._advance --> events --> front (the copy thread)

Each turn of the step loop, and each batch of the copy thread, is one callback on the virtual clock.
What a turn computes happens at once, and the time that it takes passes on the process's own clock:
its messages leave then, and the next turn begins then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.execution.engine import EngineConfig
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, encode_batch
from engine.ipc.counters import SpeculationStatus
from engine.ipc.settings import EngineSettings
from engine.ipc.shared_memory import Arena
from engine.process.server import EngineServer
from engine.process.session import CacheListener, EngineSession
from engine.scheduling.step_policy import StepPlan, plan_decode_step, plan_prefill_step
from engine.slots.devices import CpuCopies
from protocol.block_keys import BLOCK_TOKENS
from tests.simulation.fakes.engine_channels import EngineEnd, Pipe, SimPopen, SlotSocket
from tests.simulation.fakes.engine_speed import EngineSpeed
from tests.simulation.fakes.toy_model import KV, VOCAB, ToyEngine
from tests.simulation.fakes.virtual_loop import SimProcess, VirtualLoop

POLICIES = {"prefill": plan_prefill_step, "decode": plan_decode_step}


class SimEngine:
    """One engine process of a front. ``spawn`` of the world creates it; it ends with the front."""

    def __init__(
        self,
        loop: VirtualLoop,
        front: SimProcess,
        name: str,
        settings: EngineSettings,
        speed: EngineSpeed,
        on_crash: Callable[[str], None],
    ) -> None:
        self.process = SimProcess(loop, name)
        self.front = front
        self.settings = settings
        self.speed = speed
        self._loop = loop
        self._on_crash = on_crash
        self.arena = Arena.create(settings.arena)
        self.commands = EngineEnd(m.Command, self._wake)
        self.slots = EngineEnd(m.SlotCommand, self._wake_copies)
        self.pipe = Pipe(self, front)
        self.engine: ToyEngine | None = None
        self.server: EngineServer | None = None
        self._ahead_s = 0.0  # by which the process's clock is ahead of the loop's
        self._busy = False
        self._busy_until = 0.0
        self._turn_at = float("inf")
        self._copying_at = float("inf")
        self._last_to_engine = self._last_to_front = 0.0
        self.returncode: int | None = None
        self.process.on_kill.append(self._killed)
        for share, what in ((0.3, "reading weights"), (0.7, "warming up")):
            self._later(speed.load_s * share, self._say, m.Progress(what, share))
        self._later(speed.load_s, self._start)

    # ---- the process ------------------------------------------------------------------------

    def clock(self) -> float:
        return self._loop.now + self._ahead_s

    def _later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay, call, *args, context=self.process.context.copy())

    def _killed(self) -> None:
        self.returncode = -9
        self.arena.release_fd()
        self._send_to_front(b"")

    def _start(self) -> None:
        settings, speed = self.settings, self.speed
        config = EngineConfig(
            step_budget_ms=None,
            ttft_slo_s=None,
            tpot_slo_s=None,
            kv_precision="exact",
            batch_invariant=False,
            max_batch=speed.max_batch,
            prefill_chunk=speed.chunk,
            pages=speed.pages,
            max_model_len=speed.max_model_len,
            kv_storage="wide",
        )
        self.engine = engine = ToyEngine(config, POLICIES[settings.role], self.clock, self._elapse)
        private = torch.empty(1, settings.arena.slot_bytes, dtype=torch.uint8)
        self.commands.send = self._send_events
        self.server = EngineServer(
            engine,
            None,  # type: ignore[arg-type]  # no request has a grammar
            self.commands,  # type: ignore[arg-type]
            self.arena,
            self.slots,  # type: ignore[arg-type]
            SpeculationStatus(),
            lambda role: engine.take_role(POLICIES[role], drafts=False),
            self.clock,
            CpuCopies(engine.pool, private),
        )
        ready = m.EngineReady(
            "toy", VOCAB, speed.max_model_len, KV, speed.pages * BLOCK_TOKENS, speed.longest_step_s
        )
        self._say(ready)
        self._schedule(self._loop.now)

    # ---- messages ---------------------------------------------------------------------------

    def _say(self, event: Any) -> None:
        self._send_events([event])

    def _send_events(self, events: Sequence[Any]) -> None:
        if events:
            self._send_to_front(encode_batch(events))

    def _send_to_front(self, data: bytes) -> None:
        at = max(self._last_to_front, self.clock() + 0.0001)
        self._last_to_front = at
        self._loop.deliver_at(at, self.front, self.pipe.take, data)

    def send_to(self, take: Callable[[bytes], None], data: bytes) -> None:
        """Bring bytes of the front to one of the two channels."""
        at = max(self._last_to_engine, self._loop.now + 0.0001)
        self._last_to_engine = at
        self._loop.deliver_at(at, self.process, take, data)

    # ---- the step loop ----------------------------------------------------------------------

    def _elapse(self, plan: StepPlan) -> None:
        self._ahead_s += self.speed.step_s(plan)

    def _wake(self) -> None:
        if self.server is not None:
            self._schedule(max(self._loop.now, self._busy_until))

    def _schedule(self, at: float) -> None:
        if at < self._turn_at or self._turn_at <= self._loop.now:
            self._turn_at = at
            self._later(at - self._loop.now, self._turn, at)

    def _turn(self, at: float) -> None:
        if at != self._turn_at or self.server is None:
            return  # another turn has come before it
        self._turn_at = float("inf")
        self._ahead_s = 0.0
        try:
            self._busy = self.server.turn(self._busy)
        except ChannelClosed:
            self.process.kill()
            return
        except Exception as error:
            self._on_crash(f"{self.process.name}: {type(error).__name__}: {error}")
            raise
        self._busy_until = self.clock()
        self._ahead_s = 0.0
        self._schedule(self._busy_until + (0.00005 if self._busy else m.BEAT_S))

    # ---- the copy thread --------------------------------------------------------------------

    def _wake_copies(self) -> None:
        if self.server is not None:
            self._schedule_copy(self.clock() + 0.0001)

    def _schedule_copy(self, at: float) -> None:
        if at < self._copying_at:
            self._copying_at = at
            self._later(max(0.0, at - self._loop.now), self._copy, at)

    def _copy(self, at: float) -> None:
        if at != self._copying_at or self.server is None:
            return
        self._copying_at = float("inf")
        try:
            busy = self.server._copies._advance(busy=False)
        except ChannelClosed:
            return
        except Exception as error:
            self._on_crash(f"{self.process.name} copying: {type(error).__name__}: {error}")
            raise
        if busy:
            self._schedule_copy(self._loop.now + self.speed.frame_s())


def session_of(engine: SimEngine, cache: CacheListener | None) -> EngineSession:
    """Return the front's real session with ``engine``."""
    pipe: Any = engine.pipe
    sockets: Any = SlotSocket(engine)
    popen: Any = SimPopen(engine)
    return EngineSession(popen, engine.arena, pipe, sockets, cache)
