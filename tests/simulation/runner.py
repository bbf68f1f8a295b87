"""Runs the cluster of one seed, and says what was wrong: ``run_seed``.

start workers and routers -> requests and faults, both from the seed -> all have ended
    -> some quiet seconds -> nothing is left
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
import secrets
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from decode_worker.request import DecodeRequest
from engine.process import client as engine_client
from kvtransfer.links import LinkTable
from kvtransfer.receiver_context import PrefillChannels
from router.workers import outbox
from tests.simulation.fakes.virtual_loop import VirtualLoop, VirtualTime, virtual_time
from tests.simulation.faults import Fault, FaultInjector, draw_faults
from tests.simulation.invariants import Invariants
from tests.simulation.sim_router import SimRequest, SimRouter
from tests.simulation.world import SimFront, World

LIMIT_S = 240.0
"""Virtual seconds after which a run that has not ended is a failure."""

QUIET_S = 8.0
"""Virtual seconds without a fault after which nothing of an ended request may be left."""

MESSAGE_BYTES = 300
"""Bytes of submits in one message of a router: one prompt or two, so that more than one waits."""


class SeedResult(NamedTuple):
    """What a run has shown. ``digest`` of its trace: equal runs have equal ones."""

    seed: int
    violations: list[str]
    trace: list[str]
    events: int
    digest: str
    outcomes: list[str]


class Simulation:
    """One process's simulations, which share the patches of clocks and of ``spawn_engine``."""

    def __init__(self) -> None:
        self._clock = VirtualTime()
        self._world: World | None = None
        self._invariants: Invariants | None = None
        self._requests: list[SimRequest] = []

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Put the simulated world in the place of the real one, for this process."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(virtual_time(self._clock))
            stack.enter_context(_replaced(engine_client, "spawn_engine", self._spawn_engine))
            stack.enter_context(_replaced(outbox, "MESSAGE_BYTES", MESSAGE_BYTES))
            stack.enter_context(_replaced(secrets, "token_bytes", self._token_bytes))
            stack.enter_context(_wrapped(LinkTable, "failed", self._on_link_failed))
            stack.enter_context(_wrapped(PrefillChannels, "suspect", self._on_suspected))
            stack.enter_context(_wrapped(DecodeRequest, "_drop_attempt", self._on_attempt_failed))
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.CRITICAL)
            gc.collect()
            gc.freeze()
            gc.disable()
            stack.callback(gc.enable)
            stack.callback(gc.unfreeze)
            # What is left of a run is collected between two runs. Its coroutines end then, on no
            # loop, which is nobody's business.
            stack.enter_context(_replaced(sys, "unraisablehook", lambda unraisable: None))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
            gc.collect()

    def _spawn_engine(self, argv: list[str], settings: Any, cache: Any = None) -> Any:
        assert self._world is not None
        return self._world.spawn_engine(argv, settings, cache)

    def _token_bytes(self, count: int = 32) -> bytes:
        return self._random.randbytes(count)

    def _on_link_failed(self, table: LinkTable, instance: str, carrier: str, why: str) -> None:
        front = self._find(lambda f: f.receiver.links is table)
        if self._invariants is not None and front is not None:
            self._invariants.on_link_failed(front, instance, f"{carrier}: {why}")

    def _on_suspected(self, channels: PrefillChannels, endpoint: str) -> None:
        front = self._find(lambda f: f.channels is channels)
        if self._invariants is not None and front is not None:
            self._invariants.on_suspected(front, endpoint)

    def _on_attempt_failed(self, request: DecodeRequest, error: Exception) -> None:
        front = self._find(lambda f: f.client is request._engine)
        if self._invariants is not None and front is not None:
            self._invariants.on_attempt_failed(front, request, error)

    def _find(self, condition: Any) -> SimFront | None:
        fronts = self._world.all_fronts if self._world is not None else []
        return next((front for front in fronts if condition(front)), None)

    def run(self, seed: int, faults: list[Fault] | None = None) -> SeedResult:
        """Run one seed within ``patched``. ``faults`` replaces those of the seed."""
        gc.collect()  # it is off during a run, whose order it would decide
        loop = VirtualLoop()
        self._clock.loop = loop
        self._random = random.Random(f"{seed} secrets")
        self._invariants = None
        try:
            asyncio._set_running_loop(loop)
            world = self._world = World(loop, seed)
            asyncio._set_running_loop(None)
            try:
                loop.run(self._live(world, faults), LIMIT_S)
            except TimeoutError as error:
                world.violations.append(str(error))
        finally:
            asyncio._set_running_loop(None)
            self._clock.loop = None
            if self._world is not None:
                self._world.close()
        violations = [*dict.fromkeys([*world.violations, *loop.failures])]
        text = "\n".join([*world.trace, str(loop.events)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        outcomes = [o for r in self._requests for o in r.outcomes]
        self._world = self._invariants = None
        self._requests = []
        return SeedResult(seed, violations, world.trace, loop.events, digest, outcomes)

    async def _live(self, world: World, faults: list[Fault] | None) -> None:
        self._requests = []
        rng = world.rng_for("load")
        names = [f"r{index}" for index in range(rng.choice(world.profile.routers))]
        routers = {name: SimRouter(world, name) for name in names}
        injector = FaultInjector(
            world,
            routers,
            draw_faults(world.rng_for("faults"), world, names) if faults is None else faults,
        )
        self._invariants = invariants = Invariants(world, routers, injector)
        await world.wait_until_serving()
        while min(r.attached for r in routers.values()) < sum(
            role == "decode" for role in world.roles.values()
        ):
            await asyncio.sleep(0.1)
        world.loop.on_events = invariants.check
        injecting = asyncio.create_task(injector.run())
        await self._send_requests(world, rng, list(routers.values()))
        while not all(request.outcomes for request in self._requests):
            await asyncio.sleep(0.25)
            if world.violations:
                return
        injector.finish()
        await injecting
        invariants.check_outcomes()
        quiet_until = max(world.loop.now, injector.over_s) + QUIET_S
        while invariants.leftovers() and world.loop.now < quiet_until:
            await asyncio.sleep(0.25)
        invariants.check_nothing_left()

    async def _send_requests(
        self, world: World, rng: random.Random, routers: list[SimRouter]
    ) -> None:
        """Send requests at seeded times, some of them in bursts."""
        shared = [rng.randrange(1, 97) for _ in range(96)]
        count, span = rng.choice(world.profile.requests), world.profile.arrivals_s
        bursts = rng.uniform(0, span), rng.uniform(0, span)
        times = sorted(rng.choice((rng.uniform(0, span), *bursts)) for _ in range(count))
        began = world.loop.now
        for index, at in enumerate(times):
            await asyncio.sleep(max(0.0, began + at - world.loop.now))
            router = rng.choice(routers)
            request = SimRequest(f"{router.name}-{index}", router, rng, shared)
            self._requests.append(request)
            world.note(
                f"{request.name}: {len(request.prompt)} tokens, {request.max_tokens} at most"
            )
            router.send(request)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _wrapped(owner: Any, name: str, observe: Any) -> Any:
    """Call ``observe`` before each call of a method."""
    before = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        observe(self, *args)
        return before(self, *args)

    return _replaced(owner, name, method)
