"""Several routers over the same workers, against one: goodput, hit rate and waits.

    python -m bench.router.many_routers [--routers N] [--rate R] [--seconds S] [--seed N]

    conversations --turns, each to any router--> PoolRouter: the product's queue, placer, ledger,
        estimates, index and links --> PooledWorker: prefill in order, decode in batches
    workers --loads when they have changed, cache events 30 ms late--> every router
    router --prompts that it has sent, 4 ms late--> the other routers

Clients and workers are simulated on a virtual clock, with the same conversations for every number
of routers. "heartbeats" are routers that hear of decode workers twice a second, and of prefill
workers by the directory only. Goodput is requests per second that meet both objectives, and the hit
rate is cached over prompt tokens.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from bench.lib.report import ResultRow, finish, percentile
from bench.router.pool_router import GOALS, MAX_TOKENS, PATH_S, PoolRouter
from bench.router.pooled_workers import PooledWorker, PoolLinks, PoolTurn
from cluster.simulator.devices.clock import SimulatedClock
from decode_worker.router_link import HEARTBEAT_S
from decode_worker.service import load_has_changed, push_interval_s
from engine.ipc.messages import LEAST_BEAT_S
from protocol.block_keys import BLOCK_TOKENS
from protocol.registry.leases import RENEW_S
from protocol.roles import ROLES
from protocol.wire import wire_pb2 as pb

CACHE_EVENT_S = 0.03
REFRESH_S = 0.5  # from one read of the directory to the next: ``RouterSettings.refresh_s``
WARM = 0.2  # share of the time that is not counted
TURN_AGAIN, THINK_S = 0.75, 4.0
GROUPS, SHARED_BLOCKS = 8, 16  # system prompts, and the blocks of each


class SharedPoolPlan(NamedTuple):
    """What one run simulates."""

    routers: int
    rate: float = 18.0  # new conversations per second
    seconds: float = 60.0
    workers: int = 4  # of each pool
    seed: int = 1
    pushes: bool = True


class SharedPoolResult(NamedTuple):
    """What all clients together got."""

    goodput: float  # requests per second
    hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    refused: float  # share
    error: float  # median of |predicted - observed| / observed TTFT


class SharedPool:
    """One simulated cluster and its clients."""

    def __init__(self, plan: SharedPoolPlan) -> None:
        self.pushes = 0
        self._plan, self._clock, self._turns = plan, SimulatedClock(), list[PoolTurn]()
        self._rng, self._to_router = Random(plan.seed), Random(plan.seed + 1)
        links = PoolLinks(self._clock, self._cached_at, self._on_cache, self._on_load)
        names = [(f"{role[0]}{i}", role) for role in ROLES for i in range(plan.workers)]
        self._workers = {name: PooledWorker(name, role, links) for name, role in names}
        self._told = {name: worker.load() for name, worker in self._workers.items()}
        self._due: dict[str, float] = dict.fromkeys(self._workers, 0.0)  # when told last, or next
        self._records = {name: worker.record() for name, worker in self._workers.items()}
        self._routers = [
            PoolRouter(number, self._clock, self._workers) for number in range(plan.routers)
        ]
        for router in self._routers:
            router.others = [other for other in self._routers if other is not router]
        for place, worker in enumerate(self._workers.values()):
            share = place / len(self._workers)
            self._clock.at(RENEW_S * share, self._publish, worker)
            self._clock.at(HEARTBEAT_S * share, self._heartbeat, worker)
        for place, router in enumerate(self._routers):
            router.take_records(self._records)
            self._clock.at(REFRESH_S * place / len(self._routers), self._refresh, router)

    # ---- what routers hear ------------------------------------------------------------------

    def _publish(self, worker: PooledWorker) -> None:
        self._records[worker.name] = worker.record()
        self._clock.at(self._clock.now + RENEW_S, self._publish, worker)

    def _refresh(self, router: PoolRouter) -> None:
        if not self._plan.pushes:  # else the links to prefill workers bring newer loads
            router.take_records(self._records)
        self._clock.at(self._clock.now + REFRESH_S, self._refresh, router)

    def _heartbeat(self, worker: PooledWorker) -> None:
        if worker.role == "decode" or self._plan.pushes:
            self._tell(worker)
        self._clock.at(self._clock.now + HEARTBEAT_S, self._heartbeat, worker)

    def _on_load(self, worker: PooledWorker) -> None:
        now, due = self._clock.now, self._due[worker.name]
        if self._plan.pushes and due <= now:
            interval_s = push_interval_s(len(self._routers))
            self._due[worker.name] = max(now, due + interval_s) + LEAST_BEAT_S
            self._clock.at(self._due[worker.name], self._push, worker)

    def _push(self, worker: PooledWorker) -> None:
        if load_has_changed(worker.load(), self._told[worker.name]):
            self.pushes += 1
            self._tell(worker)

    def _tell(self, worker: PooledWorker) -> None:
        self._told[worker.name] = worker.load()
        for router in self._routers:
            load = pb.Load()
            load.CopyFrom(self._told[worker.name])
            load.submits_seen = router.submits_seen[worker.name]
            self._clock.at(self._clock.now + PATH_S, router.take_load, worker, load)

    def _on_cache(self, name: str, stored: list[bytes], evicted: list[bytes]) -> None:
        for router in self._routers:
            self._clock.at(self._clock.now + CACHE_EVENT_S, router.index.store, name, stored)
            self._clock.at(self._clock.now + CACHE_EVENT_S, router.index.evict, name, evicted)

    def _cached_at(self, name: str, keys: Sequence[bytes]) -> int:
        return self._workers[name].cached_blocks(keys)

    # ---- clients ----------------------------------------------------------------------------

    def run(self) -> SharedPoolResult:
        """Serve the conversations that begin in time, and let their last turns end."""
        plan, at, number = self._plan, 0.0, 0
        while (at := at + self._rng.expovariate(plan.rate)) < plan.seconds:
            number += 1
            self._clock.at(at, self._begin, number, Random(self._rng.getrandbits(32)))
        self._clock.run_before(plan.seconds + 20 * GOALS.ttft_s + MAX_TOKENS * GOALS.tpot_s)
        return self._result()

    def _begin(self, number: int, rng: Random) -> None:
        shared = _blocks(0, rng.randrange(GROUPS), range(SHARED_BLOCKS))
        self._send(number, rng, shared, rng.randrange(64, 192))

    def _send(self, number: int, rng: Random, before: list[bytes], more_blocks: int) -> None:
        """Send a turn: ``before`` and new blocks. Its answer will be part of the next prompt."""
        if self._clock.now > self._plan.seconds:
            return
        output = min(MAX_TOKENS, max(2, int(rng.lognormvariate(4.7, 0.7))))
        tokens = (len(before) + more_blocks) * BLOCK_TOKENS + rng.randrange(1, BLOCK_TOKENS)
        new = _blocks(1, number, range(len(before), (tokens + output) // BLOCK_TOKENS))
        turn = PoolTurn([*before, *new], tokens, output, b"")
        self._turns.append(turn)

        def send_next() -> None:
            if rng.random() < TURN_AGAIN:
                at = self._clock.now + rng.expovariate(1 / THINK_S)
                self._clock.at(at, self._send, number, rng, turn.keys, rng.randrange(2, 12))

        turn.on_end = send_next
        self._to_router.choice(self._routers).serve(turn)

    def _result(self) -> SharedPoolResult:
        counted = [t for t in self._turns if t.arrived >= WARM * self._plan.seconds]
        ended = [t for t in counted if t.end_s]
        ttft = [t.first_s - t.arrived for t in ended]
        tpot = [(t.end_s - t.first_s) / (t.output - 1) for t in ended]
        both = zip(ttft, tpot, strict=True)
        good = sum(a <= GOALS.ttft_s and b <= GOALS.tpot_s for a, b in both)
        return SharedPoolResult(
            good / ((1 - WARM) * self._plan.seconds),
            sum(t.cached for t in ended) / sum(t.tokens for t in ended),
            *(percentile(ttft, 0.5), percentile(ttft, 0.9), percentile(tpot, 0.9)),
            sum(t.is_refused for t in counted) / len(counted),
            percentile([error for router in self._routers for error in router.errors], 0.5),
        )


def _blocks(kind: int, owner: int, places: range) -> list[bytes]:
    return [struct.pack("<IIQ", place * 7919 % (1 << 32), kind, owner) for place in places]


def _rows(name: str, found: SharedPoolResult, one: SharedPoolResult) -> list[ResultRow]:
    return [
        ResultRow(
            f"{name}: goodput", found.goodput, "/s", "one router", found.goodput / one.goodput
        ),
        ResultRow(
            f"{name}: hit rate", found.hit_rate, "", "one router", found.hit_rate / one.hit_rate
        ),
        ResultRow(f"{name}: TTFT p50", 1e3 * found.ttft_p50_s, "ms"),
        ResultRow(f"{name}: TTFT p90", 1e3 * found.ttft_p90_s, "ms"),
        ResultRow(f"{name}: refused", found.refused, ""),
        ResultRow(f"{name}: prediction off by", found.error, "of observed TTFT"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=18.0, help="conversations per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    plan = SharedPoolPlan(1, options.rate, options.seconds, seed=options.seed)
    several = plan._replace(routers=options.routers)
    one = SharedPool(plan).run()
    rows = _rows("one router", one, one)
    rows += _rows(f"{options.routers} routers", SharedPool(several).run(), one)
    told = SharedPool(several._replace(pushes=False)).run()
    finish("many_routers", rows + _rows(f"{options.routers} routers, heartbeats", told, one))


if __name__ == "__main__":
    main()
