"""One simulated router with its requests: the real pool, placer, admission and choice streams.

A request goes the way of the product from ``ChoiceStream.start`` on; what lies before it (HTTP,
tokenizing) and behind it (bytes) is not simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from protocol.block_keys import block_keys
from protocol.registry.directory import Directory, WorkerRecord
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from router.common.errors import ApiError
from router.common.request_body import ClientDisconnected
from router.fairness.dispatcher import FairDispatcher
from router.fairness.fair_queue import FairQueue
from router.fairness.overload import OverloadMonitor
from router.fairness.virtual_counters import VirtualCounters
from router.generation.choice_stream import (
    ChoiceStream,
    GenerationRequest,
    RoutingServices,
)
from router.generation.choice_text import OutputOptions
from router.generation.choice_turn import RequestEntry
from router.generation.metrics import RouterMetrics
from router.generation.output_text import SharedPromptLogprobs
from router.generation.placer import Placer
from router.placement.admission import AdmissionController
from router.placement.estimates import RoutingEstimates
from router.placement.ledger import QueuedPrompts, WorkLedger
from router.placement.prefix_index import PrefixIndex
from router.workers.pool import WorkerPool
from tests.simulation.fakes.rpc import SimSecurity
from tests.simulation.fakes.toy_model import oracle
from tests.simulation.fakes.virtual_loop import SimProcess
from tests.simulation.world import ROUTER_SETTINGS, TOKEN, World

ROOT = b"\0" * 16
METRICS = RouterMetrics("toy", ROUTER_SETTINGS.goals)  # shared by all seeds: they only count


class _Detokenizer:
    def push(self, tokens: Iterable[int]) -> str:
        return "".join(self.push_one(token)[0] for token in tokens)

    def push_one(self, token: int) -> tuple[str, int]:
        text = f"{token} "
        return text, len(text)

    def flush(self) -> str:
        return ""


class _Vocabulary:
    def detokenizer(self, *, skip_special: bool = True) -> _Detokenizer:
        return _Detokenizer()

    def is_textless(self, token: int, *, skip_special: bool = True) -> bool:
        return False


class _WorkerTracker:
    """Tells a router's parts of its workers, as ``router.http.state.WorkerTracker`` does, whose
    module would bring the web server along."""

    def __init__(self, index: PrefixIndex, ledger: WorkLedger, estimates: RoutingEstimates) -> None:
        self._index, self._ledger, self._estimates = index, ledger, estimates
        self._known: set[str] = set()

    def on_workers(self, records: Sequence[WorkerRecord]) -> None:
        known = {record.instance for record in records}
        for gone in sorted(self._known - known):
            self._index.clear(gone)
            self._ledger.forget(gone)
        self._estimates.retain(known)
        self._known = known

    def on_load(self, instance: str, queued: QueuedPrompts, unseen: int) -> None:
        self._ledger.report(instance, *queued, unseen=unseen)


class SimRequest:
    """One request of a client, and what it has got."""

    def __init__(self, name: str, router: SimRouter, rng: random.Random, shared: list[int]) -> None:
        self.name = name
        self.router = router
        profile = router.world.profile
        length = rng.choice(profile.lengths)
        own = [rng.randrange(1, 97) for _ in range(length)]
        self.prompt = [*shared[: rng.choice((0, 0, 32, 96))], *own]
        self.max_tokens = rng.choice(profile.max_tokens)
        self.priority = rng.choice(profile.priorities)
        self.ignore_eos = rng.random() < 0.7
        self.hang_up_s: float | None = None
        if rng.random() < profile.hang_ups:
            self.hang_up_s = rng.choice(profile.hang_up_s)
        self.expected = oracle(self.prompt, self.max_tokens, ignore_eos=self.ignore_eos)
        self.text: list[int] = []
        self.began = self.ended = -1.0
        self.outcomes: list[str] = []
        self.stream: ChoiceStream | None = None

    def request(self) -> Request:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )
        return Request(
            id=self.name,
            prompt=tuple(self.prompt),
            sampling=sampling,
            cache_root=ROOT,
            priority=self.priority,
        )


class SimRouter:
    """One router process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.process = SimProcess(world.loop, name)
        self.process.on_kill.append(lambda: world.network.killed(self.process))
        self.requests: list[SimRequest] = []
        self.released: dict[str, float] = {}  # submission id -> when the router gave it up
        self.process.run(self._build)

    def _build(self) -> None:
        world = self.world
        index, estimates = PrefixIndex(), RoutingEstimates()
        world.indexes.append((self.process, index))
        self.ledger = WorkLedger(asyncio.get_running_loop().time)
        directory = Directory(cast(Any, world.redis), "sim")
        self.pool = WorkerPool(
            directory.workers.all,
            model_id="toy",
            token=TOKEN,
            refresh_s=0.5,
            listener=_WorkerTracker(index, self.ledger, estimates),
            security=cast(Any, SimSecurity(world.endpoints, self.process)),
        )
        self.admission = AdmissionController(1024)
        placer = Placer(self.pool, index, self.ledger, estimates, ROUTER_SETTINGS.goals)
        placer._rng = world.rng_for(f"{self.name} placer")
        loop = asyncio.get_running_loop()
        queue = FairQueue(VirtualCounters(loop.time))
        monitor = OverloadMonitor(queue, ROUTER_SETTINGS.goals.ttft_s, loop.time)
        self.dispatcher = FairDispatcher(queue, monitor, loop.time, loop.call_later)
        self.dispatcher.routers = lambda: self.pool.routers
        placer.awaiting_each = queue.awaiting_each
        self.services = RoutingServices(
            pool=self.pool,
            placer=placer,
            admission=self.admission,
            dispatcher=self.dispatcher,
            settings=replace(
                ROUTER_SETTINGS,
                first_token_timeout_s=world.profile.token_timeout_s,
                next_token_timeout_s=world.profile.token_timeout_s,
            ),
            metrics=METRICS,
            vocabulary=cast(Any, _Vocabulary()),
        )
        self.starting = self.process.spawn(self.pool.start(), "pool")

    @property
    def attached(self) -> int:
        return self.pool.attached

    def send(self, request: SimRequest) -> None:
        """Serve ``request`` from now on."""
        self.requests.append(request)
        if self.process.alive:
            self.process.spawn(self._serve(request), request.name)
        else:
            self._end(request, "router killed")

    def _end(self, request: SimRequest, outcome: str) -> None:
        request.outcomes.append(outcome)
        request.ended = self.world.loop.now
        self.world.note(f"{request.name} ends: {outcome}, {len(request.text)} tokens")

    async def _serve(self, request: SimRequest) -> None:
        loop = asyncio.get_running_loop()
        request.began = loop.time()
        wire = request.request()
        generation = GenerationRequest(
            wire,
            block_keys(ROOT, wire.prompt),
            loop.time(),
            RequestEntry(ROUTER_SETTINGS.admission_limits),
        )
        stream = request.stream = ChoiceStream(
            self.services, 0, generation, OutputOptions(), SharedPromptLogprobs()
        )
        if request.hang_up_s is not None:
            loop.call_later(request.hang_up_s, self._hang_up, request)
        outcome = "refused"
        try:
            stream.start()
            outcome = "lost"
            async for delta in stream.deltas():
                request.text += delta.ids
                self.world.note(f"{request.name} gets {delta.ids}")
                self._check_text(request, delta.ids)
                outcome = delta.finish or outcome
        except ApiError as error:
            outcome = f"{outcome}: {error}"
            if error.status in (429, 504):
                outcome = f"refused: {error.status}"
        except ClientDisconnected:
            outcome = "hung up"
        finally:
            if self.process.alive:
                stream.close("ok")
                self._end(request, outcome)

    def _hang_up(self, request: SimRequest) -> None:
        if not request.outcomes and request.stream is not None:
            self.world.note(f"{request.name} hangs up")
            request.stream.disconnect()

    def _check_text(self, request: SimRequest, ids: list[int]) -> None:
        if request.text != request.expected[: len(request.text)]:
            self.world.violations.append(
                f"{request.name} got {ids} after {len(request.text) - len(ids)} tokens, of"
                f" {request.expected}"
            )

    def kill(self) -> None:
        """End the process; its clients see a broken connection."""
        self.process.kill()
        for request in self.requests:
            if not request.outcomes:
                self._end(request, "router killed")
