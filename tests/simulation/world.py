"""The simulated cluster: worker fronts with their engines, routers, Redis and a network.

Everything that is built from the product's constructors is built here, so that a change of one of
them has one place in the simulator to follow.
"""

from __future__ import annotations

import asyncio
import random
from contextvars import Context
from typing import Any, cast

from msgspec.structs import replace

from bench.lib.settings import engine_settings, router_settings
from decode_worker.service import DecodeService
from engine.ipc.shared_memory import ArenaShape
from engine.process.client import EngineClient
from engine.process.session import CacheListener, EngineSession
from kvtransfer.receiver_context import KVReceiver, PrefillChannels
from prefill_worker.service import PrefillService
from protocol.block_keys import BLOCK_TOKENS
from protocol.registry.directory import Directory, ModelInfo, WorkerRecord
from protocol.registry.leases import LeaseRenewer
from protocol.roles import Role
from protocol.wire import wire_pb2 as pb
from router.placement.prefix_index import PrefixIndex
from tests.simulation.fakes.engine_process import SimEngine, session_of
from tests.simulation.fakes.engine_speed import EngineSpeed
from tests.simulation.fakes.fake_redis import FakeRedis
from tests.simulation.fakes.network import Network
from tests.simulation.fakes.rpc import Endpoints, SimSecurity, methods_of
from tests.simulation.fakes.sim_carrier import SimCarrier
from tests.simulation.fakes.toy_model import KV, VOCAB
from tests.simulation.fakes.virtual_loop import SimProcess, VirtualLoop
from tests.simulation.profiles import profile_of

TOKEN = "t" * 32
SLOT_BYTES = 2 * KV.layers * KV.block_layer_bytes(KV.codecs[0])  # two blocks
ARENA = ArenaShape(SLOT_BYTES, 6, 6)
ENGINE_SETTINGS = engine_settings("toy", arena=ARENA)
ROUTER_SETTINGS = router_settings(
    model_id="toy",
    token=TOKEN,
    first_token_timeout_s=80.0,
    next_token_timeout_s=80.0,
    resubmit_wait_s=20.0,
)
MODEL = ModelInfo(
    id="toy",
    fingerprint="toy",
    precision="exact",
    max_model_len=512,
    vocab_size=VOCAB,
    kv_bytes_per_token=KV.bytes_per_token,
)


class SimFront:
    """One worker front and its engines: one instance, from its start to its death."""

    def __init__(self, world: World, name: str, role: Role, number: int) -> None:
        self.world = world
        self.name = name
        self.role = role
        self.instance = f"{name}-{number}"
        self.endpoint = f"127.0.0.1:{10_000 + len(world.all_fronts)}"
        self.process = SimProcess(world.loop, self.instance)
        self.engines: list[SimEngine] = []
        self.speed = EngineSpeed(world.rng_for(self.instance), world.profile, world.pages)
        self.process.on_kill.append(self._on_kill)
        self.serving = False
        self.process.run(self._build)

    def _build(self) -> None:
        world = self.world
        security = cast(Any, SimSecurity(world.endpoints, self.process))
        settings = replace(ENGINE_SETTINGS, role=self.role)
        cache = _CacheFeed(world, self.instance)
        self.client = EngineClient([self.instance], settings, lambda what, share: None, cache)
        self.carriers = [SimCarrier(n, world.endpoints, self.process) for n in ("tcp", "grpc")]
        self.channels = PrefillChannels(TOKEN, security)
        carriers = cast(Any, self.carriers)
        self.receiver = KVReceiver(self.client, carriers, self.channels, "auto")
        self.prefill = PrefillService(self.client, carriers, self.receiver, self.instance)
        self.decode = DecodeService(self.client, self.receiver, self.instance)
        directory = Directory(cast(Any, world.redis), "sim")
        self.lease = LeaseRenewer(directory.workers, self.record)
        self.process.spawn(self._run(), self.instance)

    async def _run(self) -> None:
        await self.client.start()
        prefill = methods_of(self.prefill, ("/baton.v1.Prefill/Run", "Run", pb.PrefillCall))
        attach = methods_of(self.decode, ("/baton.v1.Decode/Attach", "Attach", pb.RouterMessage))
        carriers = {f"kv:{carrier.name}": carrier for carrier in self.carriers}
        self.world.endpoints.serve(self.endpoint, self.process, {**prefill, **attach, **carriers})
        self.lease.start_later(self.instance)
        self.serving = True
        while self.client.problem() is None:  # as ``Worker.serve_forever``
            await asyncio.sleep(0.5)
        self.world.note(f"{self.instance} gives up: {self.client.problem()}")
        self.world.loop.call_later(1.0, self.world.start_front, self.name, context=Context())
        self.process.kill()

    def record(self) -> WorkerRecord:
        session = self.client.current
        beat = session.beat if session is not None else None
        return WorkerRecord(
            instance=self.instance,
            role=self.role,
            endpoint=self.endpoint,
            kv_endpoint=self.endpoint,
            model=MODEL,
            pid=1,
            engine_pid=2,
            queued_tokens=beat.queued_tokens if beat else 0,
            kv_tokens_free=beat.pages_free * BLOCK_TOKENS if beat else 0,
            kv_tokens_total=self.speed.pages * BLOCK_TOKENS,
            step_model=self.speed.step_model(self.role),
            max_batch=self.speed.max_batch,
            prefill_chunk=self.speed.chunk,
            draining=self.decode.draining or self.prefill.draining,
        )

    def spawn_engine(self, settings: Any, cache: CacheListener | None) -> EngineSession:
        world = self.world
        name = f"{self.instance}/engine{len(self.engines)}"
        engine = SimEngine(
            world.loop, self.process, name, settings, self.speed, world.violations.append
        )
        self.engines.append(engine)
        return session_of(engine, cache)

    @property
    def engine(self) -> SimEngine | None:
        """The engine process of now, if it lives."""
        last = self.engines[-1] if self.engines else None
        return last if last is not None and last.process.alive else None

    def _on_kill(self) -> None:
        for engine in self.engines:  # the kernel's parent-death signal
            engine.process.kill()
        self.world.network.killed(self.process)


class _CacheFeed:
    """Tells the prefix indexes of routers what the engines of one instance have cached, as the
    events in Redis do: late, in order, and not at all while Redis does not answer."""

    def __init__(self, world: World, instance: str) -> None:
        self._world = world
        self._instance = instance
        self._last = 0.0

    def stored(self, keys: list[bytes]) -> None:
        self._tell("store", keys)

    def evicted(self, keys: list[bytes]) -> None:
        self._tell("evict", keys)

    def cleared(self) -> None:
        self._tell("clear")

    def _tell(self, change: str, *keys: list[bytes]) -> None:
        world = self._world
        if world.redis.state != "up":
            return
        self._last = max(self._last, world.loop.now + world.index_rng.uniform(0.001, 0.05))
        for process, index in world.indexes:
            change_index = getattr(index, change)
            world.loop.deliver_at(self._last, process, change_index, self._instance, *keys)


class World:
    """One cluster. ``tests.simulation.runner`` creates it for a seed, and closes it."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.seed = seed
        self.violations: list[str] = []
        self.trace: list[str] = []
        self.rng = self.rng_for("world")
        self.profile = profile = profile_of(seed)
        latency_s = self.rng.choice(profile.latency_s)
        self.network = Network(loop, self.rng_for("network"), latency_s)
        self.endpoints = Endpoints(self.network)
        self.redis = FakeRedis(loop, self.rng_for("redis"))
        self.pages = self.rng.choice(profile.pages)
        self.indexes: list[tuple[SimProcess, PrefixIndex]] = []  # of the routers
        self.index_rng = self.rng_for("index")
        self.all_fronts: list[SimFront] = []
        self.fronts: dict[str, SimFront] = {}  # the living ones, by name
        self.roles: dict[str, Role] = {}
        decode, prefill = self.rng.choice(profile.shapes)
        for index in range(decode):
            self.roles[f"d{index}"] = "decode"
        for index in range(prefill):
            self.roles[f"p{index}"] = "prefill"
        for name in self.roles:
            self.start_front(name)

    def rng_for(self, what: str) -> random.Random:
        """Return a generator of its own, so that what one part draws changes nothing elsewhere."""
        return random.Random(f"{self.seed} {what}")

    def note(self, text: str) -> None:
        """Add a line to the trace of the run."""
        self.trace.append(f"{self.loop.now:9.4f}  {text}")

    def start_front(self, name: str) -> SimFront:
        """Start a worker, in the place of the one of this name if that has died."""
        before = self.fronts.get(name)
        if before is not None and before.process.alive:
            return before
        number = sum(front.name == name for front in self.all_fronts)
        front = SimFront(self, name, self.roles[name], number)
        self.all_fronts.append(front)
        self.fronts[name] = front
        return front

    def front_of(self, instance: str) -> SimFront | None:
        return next((f for f in self.all_fronts if f.instance == instance), None)

    async def wait_until_serving(self) -> None:
        while not all(front.serving for front in self.fronts.values()):
            await asyncio.sleep(0.05)

    def spawn_engine(
        self, argv: list[str], settings: Any, cache: CacheListener | None = None
    ) -> EngineSession:
        """Stands for ``engine.process.session.spawn_engine``."""
        front = self.front_of(argv[0])
        if front is None:  # the first engine, while the front is being built
            raise AssertionError(argv)
        return front.spawn_engine(settings, cache)

    def close(self) -> None:
        """Release what the seed has taken of the machine."""
        for front in self.all_fronts:
            for engine in front.engines:
                engine.arena.release_fd()
