"""The schedule of faults of one seed: what happens when to which process, and for how long.

Faults are drawn before the run and carried out by the clock, so that what the cluster does changes
none of them. ``log`` says which processes were touched when: what happens to others is not excused.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import NamedTuple

from tests.simulation.fakes.virtual_loop import SimProcess
from tests.simulation.sim_router import SimRouter
from tests.simulation.world import SimFront, World

HARMLESS = (
    "pause router",
    "slow engine",
    "redis",
    "lapse",
    "drain",
    "break carrier",
    "kill router",
)
"""Kinds that kill no worker and make none look dead: they excuse the failure of no request."""


BETWEEN = ("cut", "cut one way", "slow link")
"""Kinds that touch two processes."""


class Fault(NamedTuple):
    """One fault. ``target`` and ``other``: names; ``seconds``: how long it lasts."""

    at: float
    kind: str
    target: str
    other: str
    seconds: float


class FaultRecord(NamedTuple):
    """One fault as it was carried out."""

    kind: str
    began: float
    ended: float
    touched: frozenset[str]  # names of processes, without the number of their incarnation


def draw_faults(rng: random.Random, world: World, routers: list[str]) -> list[Fault]:
    """Return the faults of a seed, in the order of their time."""
    profile = world.profile
    count = rng.choice(profile.faults)
    workers = list(world.roles)
    faults = []
    for _ in range(count):
        kind = rng.choices(list(profile.kinds), list(profile.kinds.values()))[0]
        at = rng.uniform(0.0, profile.faults_s)
        seconds = rng.choice((0.3, 1.5, 3.2, 4.5, 6.5))
        target = rng.choice(workers)
        other = rng.choice([name for name in (*workers, *routers) if name != target])
        if kind not in BETWEEN:
            other = ""
        if kind in ("pause router", "kill router"):
            target = rng.choice(routers)
            if kind == "pause router" and rng.random() < profile.pauses_again:
                at, seconds = rng.uniform(0.5, 1.5), 6.5
                faults += [Fault(at + n * 7.0, kind, target, "", seconds) for n in (1, 2)]
        faults.append(Fault(at, kind, target, other, seconds))
    return sorted(faults)


class FaultInjector:
    """Carries the faults out. The runner awaits ``run``, and then all of them are over."""

    def __init__(self, world: World, routers: dict[str, SimRouter], faults: list[Fault]) -> None:
        self._world = world
        self._routers = routers
        self._faults = faults
        self.log: list[FaultRecord] = []
        self._finished = asyncio.Event()

    @property
    def over_s(self) -> float:
        """When the last fault was over."""
        return max((record.ended for record in self.log), default=0.0)

    async def run(self) -> None:
        began = self._world.loop.now
        tasks = [asyncio.create_task(self._inject(began, fault)) for fault in self._faults]
        for task in tasks:
            await task

    def finish(self) -> None:
        """End all faults now, and begin no further one: no request is left that they could hit."""
        self._finished.set()

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._finished.wait()

    async def _inject(self, began: float, fault: Fault) -> None:
        world = self._world
        await self._sleep(max(0.0, began + fault.at - world.loop.now))
        if self._finished.is_set():
            return
        touched = frozenset({fault.target, fault.other} - {""})
        start = world.loop.now
        record = FaultRecord(fault.kind, start, start + fault.seconds, touched)
        self.log.append(record)
        world.note(f"fault: {fault.kind} {fault.target} {fault.other} for {fault.seconds:g} s")
        name = "_" + fault.kind.replace(" ", "_")
        await getattr(self, name)(fault)
        self.log[self.log.index(record)] = record._replace(ended=world.loop.now)
        world.note(f"fault over: {fault.kind} {fault.target} {fault.other}")

    def _process(self, name: str) -> SimProcess:
        if name in self._routers:
            return self._routers[name].process
        return self._world.fronts[name].process

    async def _pause(self, process: SimProcess, seconds: float) -> None:
        if process.paused or not process.alive:
            return
        process.pause()
        self._world.network.paused(process)
        await self._sleep(seconds)
        process.resume()

    async def _pause_router(self, fault: Fault) -> None:
        await self._pause(self._process(fault.target), fault.seconds)

    async def _pause_front(self, fault: Fault) -> None:
        await self._pause(self._process(fault.target), fault.seconds)

    async def _pause_engine(self, fault: Fault) -> None:
        engine = self._world.fronts[fault.target].engine
        if engine is not None:
            await self._pause(engine.process, fault.seconds)

    async def _kill_engine(self, fault: Fault) -> None:
        engine = self._world.fronts[fault.target].engine
        if engine is not None:
            engine.process.kill()

    async def _kill_front(self, fault: Fault) -> None:
        self._world.fronts[fault.target].process.kill()
        await self._sleep(min(fault.seconds, 3.0))
        self._world.start_front(fault.target)

    async def _kill_router(self, fault: Fault) -> None:
        self._routers[fault.target].kill()

    async def _cut(self, fault: Fault) -> None:
        await self._cut_ways(fault, both=True)

    async def _cut_one_way(self, fault: Fault) -> None:
        await self._cut_ways(fault, both=False)

    async def _cut_ways(self, fault: Fault, *, both: bool) -> None:
        a, b = self._process(fault.target), self._process(fault.other)
        ways = [(a, b), (b, a)] if both else [(a, b)]
        for way in ways:
            self._world.network.cut(*way)
        await self._sleep(fault.seconds)
        for way in ways:
            self._world.network.heal(*way)

    async def _slow_link(self, fault: Fault) -> None:
        a, b = self._process(fault.target), self._process(fault.other)
        for way in ((a, b), (b, a)):
            self._world.network.slow(*way, 0.3)
        await self._sleep(fault.seconds)
        for way in ((a, b), (b, a)):
            self._world.network.slow(*way, 0.0)

    async def _slow_engine(self, fault: Fault) -> None:
        speed = self._world.fronts[fault.target].speed
        speed.slow = 20.0
        await self._sleep(fault.seconds)
        speed.slow = 1.0

    async def _break_carrier(self, fault: Fault) -> None:
        carrier = self._world.fronts[fault.target].carriers[0]
        carrier.broken = True
        carrier.process.run(carrier.fail)
        await self._sleep(fault.seconds)
        carrier.broken = False

    async def _redis(self, fault: Fault) -> None:
        redis = self._world.redis
        redis.state = ("down", "full", "frozen")[int(fault.at * 1000) % 3]
        await self._sleep(fault.seconds)
        redis.state = "up"

    async def _lapse(self, fault: Fault) -> None:
        self._world.redis.lapse()

    async def _drain(self, fault: Fault) -> None:
        """Drain a worker as for a change of its role, and let it serve again."""
        front = self._world.fronts[fault.target]
        self._as(front, front.decode.drain)
        front.prefill.draining = True
        await self._sleep(min(1.0, fault.seconds))
        self._as(front, lambda: front.decode.hand_back("the worker is lent"))
        self._as(front, front.prefill.close)
        await self._sleep(fault.seconds)
        front.prefill.draining = False
        self._as(front, front.decode.resume)

    @staticmethod
    def _as(front: SimFront, call: object) -> None:
        """Call as the front, if it runs: a process that stands still drains nothing."""
        if front.process.runs and callable(call):
            front.process.run(call)
