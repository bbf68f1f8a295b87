"""All that a running router holds. One per application; nothing is global."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.endpoints.grpc_endpoints import Security
from protocol.registry.directory import Directory, WorkerRecord, connect
from protocol.security.tls import http_not_after
from router.common.tenants import Tenants, read_tenants
from router.common.tokenizer import Vocabulary, load_tokenizer, load_vocabulary
from router.generation.generation import Routing
from router.generation.metrics import Metrics
from router.generation.placer import Placer
from router.http.service_discovery import Published, groups
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.tools import ToolWish
from router.openai.chat.call_grammar import detect
from router.openai.chat.control_tokens import AddedTokens
from router.openai.chat.grammar_checker import GrammarChecker
from router.openai.chat.output_plan import OutputPlan, Planner
from router.openai.chat.template import ChatTemplate, load_template
from router.overview.live_overview import Viewing
from router.placement.admission import Admission
from router.placement.index_reader import Follower
from router.placement.learned import Learned
from router.placement.ledger import Ledger
from router.placement.prefix_index import PrefixIndex
from router.settings import RouterSettings
from router.walls.binding import pool_walls
from router.workers.pool import ListWorkers, Pool

# MERGED router.watch
# What the router keeps of each worker follows who is there.


class Watch:
    """The Pool's Watcher. ``follower``: None where there is no Redis to read cache events from."""

    def __init__(
        self, index: PrefixIndex, ledger: Ledger, learned: Learned, follower: Follower | None
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._learned = learned
        self._follower = follower
        self._known: set[str] = set()

    def on_workers(self, records: Sequence[WorkerRecord]) -> None:
        known = {record.instance for record in records}
        for gone in self._known - known:
            self._index.remove(gone)
            self._ledger.forget(gone)
        if known != self._known:
            self._learned.keep(known)
            if self._follower is not None:
                self._follower.follow(known)
        self._known = known

    def on_load(self, instance: str, queued_tokens: int) -> None:
        self._ledger.report(instance, queued_tokens)


# MERGED router.formats
# What the model that is served makes of chats, formats and tools: built once.


class Formats:
    """``template``: None where the model has none. ``close`` at the end."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, model_path: str
    ) -> None:
        self.template = template
        syntax = detect(template.source if template else "")
        self._planner = Planner(AddedTokens.of(tokenizer), syntax)
        self.checker = GrammarChecker(Path(model_path).absolute() / "tokenizer.json")

    async def plan(
        self, body: GenerationBody, tenant: str, wish: ToolWish | None = None
    ) -> OutputPlan:
        """What the output must be like. Raises ApiError: 400 for what no grammar can hold, 429
        where there is no time for this tenant's grammar."""
        field, structured = body.structured
        plan = self._planner.plan(wish, body.response_format, structured, field)
        return await self.checker.check(plan, tenant)

    def close(self) -> None:
        self.checker.close()


def load_formats(tokenizer: Tokenizer, model_path: str) -> Formats:
    """Raises StartupError for a chat template that cannot be used."""
    return Formats(tokenizer, load_template(model_path, tokenizer), model_path)


ROLES = ("prefill", "decode")
STATES = ("ready", "draining", "down")


def worker_states(pool: Pool) -> Counter[tuple[str, str]]:
    """Workers by role and state; a decode worker without stream or engine is down."""
    found = Counter({(role, state): 0 for role in ROLES for state in STATES})
    found.update(("decode", link.state) for link in pool.links.values())
    found.update(
        ("prefill", "draining" if record.draining else "ready") for record in pool.prefill.values()
    )
    return found


@dataclass(frozen=True)
class RouterState:
    settings: RouterSettings
    vocabulary: Vocabulary
    formats: Formats
    metrics: Metrics
    pool: Pool
    index: PrefixIndex
    follower: Follower | None
    ledger: Ledger
    learned: Learned
    admission: Admission
    placer: Placer
    tenants: Tenants
    published: Published
    viewing: Viewing
    security: Security
    started: int  # seconds since the epoch

    def show(self) -> None:
        """Set the gauges to what is now."""
        show = self.metrics
        show.decode_workers.set(self.pool.attached)
        show.index_entries.set(self.index.entries)
        show.index_staleness.set(self.follower.staleness_s if self.follower else 0.0)
        show.queued_prefill_tokens.set(sum(q.tokens for q in self.ledger.queues.values()))
        show.replicas(worker_states(self.pool))
        show.walls.show(pool_walls(self.pool.records))
        show.certificate("cluster", self.security.not_after)
        https = self.settings.http_tls
        show.certificate("https", None if https is None else http_not_after(https))

    def page(self) -> bytes:
        """What Prometheus reads."""
        self.show()
        return self.metrics.page()

    async def discovered(self) -> list[dict[str, Any]]:
        """Every live process with metrics, as ``http_sd_configs`` wants it."""
        links = [link.record for link in self.pool.links.values()]
        workers = [*links, *self.pool.prefill.values()]
        tls = self.settings.tls is not None
        return groups(workers, await self.published.listed(), self.settings.cluster, tls=tls)

    @property
    def routing(self) -> Routing:
        return Routing(self.pool, self.placer, self.admission, self.settings)


@asynccontextmanager
async def opened(
    settings: RouterSettings, list_workers: ListWorkers | None = None
) -> AsyncIterator[RouterState]:
    """Load, connect, and close it all in the end. ``list_workers`` stands in for Redis.

    Raises StartupError when there is no tokenizer to use, or another setting cannot work. A Redis
    that does not answer yet is waited for while running.
    """
    settings.check()
    tokenizer = load_tokenizer(settings.model_path)
    vocabulary = load_vocabulary(tokenizer, settings.model_path)
    tenants = read_tenants(settings.api_keys)
    index, ledger, learned = PrefixIndex(), Ledger(time.monotonic), Learned()
    follower = client = None
    state: RouterState
    published = Published(settings, lambda: state.page())
    viewing = Viewing(lambda: state.discovered(), settings.tls)
    metrics = Metrics(settings.model_id, settings.goals, published.instance)
    async with AsyncExitStack() as stack:
        formats = load_formats(tokenizer, settings.model_path)
        stack.callback(formats.close)
        if list_workers is None:
            client = connect(settings.redis_url)
            stack.push_async_callback(client.aclose)
            list_workers = Directory(client, settings.cluster).workers
            follower = Follower(client, settings.cluster, index)
            stack.push_async_callback(follower.close)
            follower.start()
        security = Security(settings.tls)
        pool = Pool(
            list_workers,
            model_id=settings.model_id,
            token=settings.token,
            refresh_s=settings.refresh_s,
            watcher=Watch(index, ledger, learned, follower),
            security=security,
        )
        stack.push_async_callback(pool.close)
        await pool.start()
        state = RouterState(
            settings=settings,
            vocabulary=vocabulary,
            formats=formats,
            metrics=metrics,
            pool=pool,
            index=index,
            follower=follower,
            ledger=ledger,
            learned=learned,
            admission=Admission(settings.max_requests, metrics.refused),
            placer=Placer(pool, index, ledger, learned, settings.goals, settings.routing_policy),
            tenants=tenants,
            published=published,
            viewing=viewing,
            security=security,
            started=int(time.time()),
        )
        stack.push_async_callback(published.close)
        stack.push_async_callback(viewing.close)
        await published.start(client)
        yield state
