"""``RouterState``: everything that a running router holds. One per application; nothing is global.

``open_router_state`` is called by the lifespan of ``router.http.app``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from protocol.endpoints.grpc_endpoints import EndpointSecurity
from protocol.registry.directory import Directory, WorkerRecord
from protocol.registry.redis_client import connect
from protocol.security.tls import http_not_after
from router.common.body_budget import BodyBudget
from router.fairness.dispatcher import FairDispatcher, look_spread_s
from router.fairness.fair_queue import FairQueue
from router.fairness.overload import OverloadMonitor
from router.fairness.virtual_counters import VirtualCounters
from router.generation.choice_stream import RoutingServices
from router.generation.metrics import ROLE, RouterMetrics
from router.generation.placer import Placer
from router.http.service_discovery import RouterRegistration, target_groups
from router.observation.observation_metrics import ObservationMetrics
from router.observation.observer import RequestObserver, open_observer
from router.openai.prompts.generation_defaults import (
    GenerationDefaults,
    load_generation_defaults,
)
from router.openai.prompts.model_formats import ModelFormats, load_model_formats
from router.overview.live_overview import LiveOverview
from router.placement.admission import AdmissionController, AdmissionLimits
from router.placement.estimates import RoutingEstimates
from router.placement.index_reader import IndexReader
from router.placement.ledger import QueuedPrompts, WorkLedger
from router.placement.prefix_exchange import PrefixExchange
from router.placement.prefix_index import PrefixIndex
from router.settings import RouterSettings
from router.tenants.tenant_services import TenantServices
from router.tenants.usage import UsageBook
from router.text.vocabulary import Vocabulary, load_tokenizer, load_vocabulary
from router.walls.binding import pool_walls
from router.workers.pool import ListWorkers, WorkerPool

ROLES = ("prefill", "decode")
STATES = ("ready", "draining", "down")


@dataclass(frozen=True)
class RouterState:
    """The parts of one router. Created and closed by ``open_router_state``."""

    settings: RouterSettings
    vocabulary: Vocabulary
    formats: ModelFormats
    defaults: GenerationDefaults  # of requests without their own sampling
    metrics: RouterMetrics
    pool: WorkerPool
    index: PrefixIndex
    index_reader: IndexReader | None
    ledger: WorkLedger
    estimates: RoutingEstimates
    bodies: BodyBudget
    admission: AdmissionController
    dispatcher: FairDispatcher
    placer: Placer
    tenants: TenantServices
    registration: RouterRegistration
    live_overview: LiveOverview
    security: EndpointSecurity
    observer: RequestObserver | None  # None: neither access log nor traces
    default_limits: AdmissionLimits  # of requests without their own deadline
    started: int  # seconds since the epoch

    def metrics_page(self) -> bytes:
        """Return the metrics as Prometheus reads them, with the gauges set to their values now."""
        metrics = self.metrics
        metrics.decode_workers.set(self.pool.attached)
        metrics.index_entries.set(self.index.entries)
        reader = self.index_reader
        metrics.index_staleness.set(reader.staleness_s if reader else 0.0)
        metrics.queued_prefill_tokens.set(sum(q.tokens for q in self.ledger.queues.values()))
        metrics.set_replicas(worker_states(self.pool))
        self.tenants.show_metrics()
        metrics.walls.show(pool_walls(self.pool.records))
        metrics.set_certificate_end("cluster", self.security.not_after)
        https = self.settings.http_tls
        metrics.set_certificate_end("https", None if https is None else http_not_after(https))
        return metrics.page()

    async def scrape_targets(self) -> list[dict[str, Any]]:
        """Return every live process with metrics in the format of ``http_sd_configs``."""
        settings, processes = self.settings, await self.registration.list_processes()
        has_tls = settings.tls is not None
        return target_groups(self.pool.records, processes, settings.cluster, tls=has_tls)

    @property
    def routing_services(self) -> RoutingServices:
        return RoutingServices(
            *(self.pool, self.placer, self.admission, self.dispatcher),
            *(self.settings, self.metrics, self.vocabulary),
        )


@asynccontextmanager
async def open_router_state(
    settings: RouterSettings, list_workers: ListWorkers | None = None
) -> AsyncIterator[RouterState]:
    """Load the tokenizer, connect to Redis and workers, and close everything in the end.

    ``list_workers`` replaces Redis, which need not be available yet. Raises StartupError.
    """
    settings.check()
    tokenizer = load_tokenizer(settings.model_path)
    vocabulary = load_vocabulary(tokenizer, settings.model_path)
    uses_defaults = settings.generation_config == "auto"
    path = settings.model_path
    defaults = load_generation_defaults(path) if uses_defaults else GenerationDefaults()
    index, ledger, estimates = PrefixIndex(), WorkLedger(time.monotonic), RoutingEstimates()
    index_reader = client = None
    state: RouterState
    registration = RouterRegistration(settings, lambda: state.metrics_page())
    live_overview = LiveOverview(lambda: state.scrape_targets(), settings.tls)
    metrics = RouterMetrics(settings.model_id, settings.goals, registration.instance)
    async with AsyncExitStack() as stack:
        formats = load_model_formats(
            tokenizer,
            settings.model_path,
            reasoning_parser=settings.reasoning_parser,
            tool_parser=settings.tool_parser,
        )
        stack.callback(formats.close)
        if list_workers is None:
            client = connect(settings.redis_url)
            stack.push_async_callback(client.aclose)
            list_workers = Directory(client, settings.cluster).workers.all
            index_reader = IndexReader(client, settings.cluster, index)
            stack.push_async_callback(index_reader.close)
            index_reader.start()
        tenants = TenantServices(
            *(settings.api_keys, settings.usage_log, metrics.registry),
            *((settings.model_id, ROLE), registration.instance),
        )
        stack.push_async_callback(tenants.close)
        observer = open_observer(
            *(settings.access_log, settings.otlp_endpoint),
            *(settings.cluster, registration.instance),
        )
        if observer is not None:
            metrics.registry.register(ObservationMetrics(observer, settings.model_id, ROLE))
            stack.push_async_callback(asyncio.to_thread, observer.close)
            observer.start()
        security = EndpointSecurity(settings.tls)
        pool = WorkerPool(
            list_workers,
            model_id=settings.model_id,
            token=settings.token,
            refresh_s=settings.refresh_s,
            listener=WorkerTracker(index, ledger, estimates, index_reader),
            security=security,
        )
        stack.push_async_callback(pool.close)
        dispatcher = new_dispatcher(settings.goals.ttft_s, tenants.book, metrics)
        stack.callback(dispatcher.close)
        ledger.on_less_work = dispatcher.wake
        ledger.on_report = dispatcher.look_soon
        dispatcher.routers = lambda: pool.routers
        dispatcher.spread_s = lambda: look_spread_s(pool.routers, len(pool.prefill))
        await pool.start()
        placer = Placer(pool, index, ledger, estimates, settings.goals)
        placer.awaiting_each = dispatcher.queue.awaiting_each
        if client is not None:
            about = (client, settings.cluster, registration.instance, ledger)
            exchange = PrefixExchange(*about, lambda: pool.routers > 1)
            stack.push_async_callback(exchange.close)
            exchange.start()
            placer.announce = exchange.announce
        state = RouterState(
            settings=settings,
            vocabulary=vocabulary,
            formats=formats,
            defaults=defaults,
            metrics=metrics,
            pool=pool,
            index=index,
            index_reader=index_reader,
            ledger=ledger,
            estimates=estimates,
            bodies=BodyBudget(settings.max_body_bytes),
            admission=AdmissionController(settings.max_requests, metrics.count_refusal),
            dispatcher=dispatcher,
            placer=placer,
            tenants=tenants,
            registration=registration,
            live_overview=live_overview,
            security=security,
            observer=observer,
            default_limits=settings.admission_limits,
            started=int(time.time()),
        )
        tenants.start(client, settings.cluster)
        stack.push_async_callback(registration.close)
        stack.push_async_callback(live_overview.close)
        await registration.start(client)
        yield state


def new_dispatcher(ttft_slo_s: float, book: UsageBook, metrics: RouterMetrics) -> FairDispatcher:
    """Return the queue of one router. Call it within the event loop."""
    clock = time.perf_counter  # as that of the requests' arrivals
    queue = FairQueue(VirtualCounters(clock, book))
    metrics.queue.read(lambda: queue.length, lambda: queue.prompt_tokens)
    return FairDispatcher(
        queue,
        OverloadMonitor(queue, ttft_slo_s, clock),
        clock,
        asyncio.get_running_loop().call_later,
        metrics.count_refusal,
        metrics.queue.observe_dispatch,
    )


class WorkerTracker:
    """Tells index, ledger and estimates which workers are in use. One router's ``WorkerListener``.

    ``index_reader`` is None where there is no Redis to read cache events from.
    """

    def __init__(
        self,
        index: PrefixIndex,
        ledger: WorkLedger,
        estimates: RoutingEstimates,
        index_reader: IndexReader | None,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._estimates = estimates
        self._index_reader = index_reader
        self._known: set[str] = set()

    def on_workers(self, records: Sequence[WorkerRecord]) -> None:
        known = {record.instance for record in records}
        for gone in self._known - known:
            self._index.clear(gone)
            self._ledger.forget(gone)
        if known != self._known:
            self._estimates.retain(known)
            if self._index_reader is not None:
                self._index_reader.follow(known)
        self._known = known

    def on_load(self, instance: str, queued: QueuedPrompts, unseen: int) -> None:
        self._ledger.report(instance, *queued, unseen=unseen)


def worker_states(pool: WorkerPool) -> Counter[tuple[str, str]]:
    """Return worker counts by (role, state). A decode worker without link or engine is down."""
    counts = Counter({(role, state): 0 for role in ROLES for state in STATES})
    counts.update(("decode", link.state) for link in pool.links.values())
    counts.update(
        ("prefill", "draining" if record.draining else "ready") for record in pool.prefill.values()
    )
    return counts
