"""All that a running router holds. One per application; nothing is global."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from protocol.directory import Directory, connect
from protocol.security import Security
from protocol.tls import http_not_after
from router.admission import Admission
from router.follow import Follower
from router.formats import Formats, load_formats
from router.generate import Routing
from router.index import PrefixIndex
from router.learned import Learned
from router.ledger import Ledger
from router.metrics import Metrics
from router.overview.viewing import Viewing
from router.placing import Placer
from router.sd import Published, groups
from router.settings import RouterSettings
from router.tenants import Tenants, read_tenants
from router.tokens import load_tokenizer
from router.vocabulary import Vocabulary, load_vocabulary
from router.walls.pools import pool_walls
from router.watch import Watch
from router.workers import ListWorkers, Pool

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
