"""A worker whose lease has lapsed is removed only when a direct probe fails as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc.aio
import msgspec
import pytest

from decode_worker.service import DecodeService
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, server_options
from protocol.registry.directory import ModelInfo, WorkerRecord
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.wire import wire_pb2_grpc as rpc
from router.workers import probes as probes_module
from router.workers.departures import GRACE_S, KnownWorker, PrefillRegistry, who_is_gone
from router.workers.probes import MAX_PROBES, PROBE_EVERY_S, WorkerProbes, probe_worker
from tests.router.fake_worker import TOKEN
from tests.router.workers.test_workers import prefill


class World:
    """Prefill workers that answer probes or do not, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.dead: set[str] = set()
        self.hung: set[str] = set()
        self.probed: list[str] = []
        self.most_at_once = self._at_once = 0
        self.probes = WorkerProbes(self._probe, lambda: self.now)
        self.registry = PrefillRegistry(self.probes, lambda: self.now)

    async def _probe(self, record: WorkerRecord) -> bool:
        self.probed.append(record.instance)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0)
            if record.instance in self.hung:
                await asyncio.Event().wait()
            return record.instance not in self.dead
        finally:
            self._at_once -= 1

    async def look(self, listed: list[WorkerRecord], seconds: float = 0.5) -> set[str]:
        """Refresh once, and let the probes run; return the workers in use."""
        self.now += seconds
        used = set(self.registry.update(listed))
        for _ in range(6):
            await asyncio.sleep(0)
        return used


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.probes.close()


async def test_the_view_stays_while_all_leases_lapse_and_probes_are_answered(
    world: World, model_info: ModelInfo
) -> None:
    """Redis at maxmemory, or emptied: all leases lapse at once, and once all workers vanished after
    GRACE_S."""
    records = [prefill(f"p{i}", model_info) for i in range(9)]
    everyone = {r.instance for r in records}
    assert await world.look(records) == everyone
    for _ in range(40):  # 20 s
        assert await world.look([]) == everyone
    assert await world.look(records) == everyone


async def test_the_dead_go_and_the_others_stay(world: World, model_info: ModelInfo) -> None:
    records = [prefill(f"p{i}", model_info) for i in range(9)]
    await world.look(records)
    world.dead |= {"p1", "p5"}
    for _ in range(12):
        used = await world.look([])
    assert used == {r.instance for r in records} - world.dead


async def test_a_worker_is_kept_for_the_grace_and_dropped_after_it(
    world: World, model_info: ModelInfo
) -> None:
    record = prefill("p0", model_info)
    await world.look([record])
    began = world.now
    world.dead.add("p0")
    while await world.look([]):
        assert world.now - began < GRACE_S
    assert world.now - began < GRACE_S + 0.6


async def test_probes_are_bounded_in_number_and_rate(world: World, model_info: ModelInfo) -> None:
    records = [prefill(f"p{i}", model_info) for i in range(40)]
    await world.look(records)
    assert not world.probed, "who is listed is not probed"
    world.hung |= {f"p{i}" for i in range(3)}
    began = world.now
    for _ in range(40):
        await world.look([], 0.1)
    assert world.most_at_once <= MAX_PROBES
    for record in records:
        times = world.probed.count(record.instance)
        assert 1 <= times <= (world.now - began) / PROBE_EVERY_S + 1, record.instance


async def test_another_instance_on_the_port_or_another_role_ends_it_at_once(
    world: World, model_info: ModelInfo
) -> None:
    record = prefill("p0", model_info)
    successor = msgspec.structs.replace(record, instance="p1")
    await world.look([record])
    assert await world.look([successor]) == {"p1"}
    assert await world.look([msgspec.structs.replace(successor, role="decode")]) == set()


def test_who_is_gone(model_info: ModelInfo) -> None:
    a, b, c, d = (prefill(f"p{i}", model_info) for i in range(4))
    known = [
        KnownWorker(a, alive=False, refuted=True),
        KnownWorker(b, alive=True, refuted=False),
        KnownWorker(c, alive=False, refuted=False),  # its probe is under way
        KnownWorker(d, alive=True, refuted=False),
    ]
    assert who_is_gone([], known) == {"p0"}
    assert who_is_gone([a], known) == set()
    on_its_port = msgspec.structs.replace(d, instance="new")
    assert who_is_gone([on_its_port], known) == {"p0", "p3"}


async def test_a_probe_finds_exactly_the_instance_that_it_asks_for(
    model_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes_module, "PROBE_S", 0.5)
    server = grpc.aio.server(options=server_options(), interceptors=[AsyncTokenGuard(TOKEN)])
    engine = SimpleNamespace(current=None)  # which is being replaced: the worker lives
    service = DecodeService(engine, None, "p0")  # type: ignore[arg-type]
    rpc.add_DecodeServicer_to_server(service, server)
    endpoint = LOOPBACK_ONLY.listen(server, "127.0.0.1", 0)
    await server.start()
    record = msgspec.structs.replace(prefill("p0", model_info), endpoint=endpoint)
    assert await probe_worker(record, TOKEN, LOOPBACK_ONLY)
    assert not await probe_worker(record, "wrong", LOOPBACK_ONLY)
    other = msgspec.structs.replace(record, instance="another")
    assert not await probe_worker(other, TOKEN, LOOPBACK_ONLY)
    far = msgspec.structs.replace(record, endpoint="192.0.2.1:1")
    assert not await probe_worker(far, TOKEN, LOOPBACK_ONLY)
    await server.stop(0)
    assert not await probe_worker(record, TOKEN, LOOPBACK_ONLY)
    assert not service._links


async def test_a_worker_that_hangs_fails_its_probe(
    model_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes_module, "PROBE_S", 0.1)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    record = msgspec.structs.replace(prefill("p0", model_info), endpoint=f"127.0.0.1:{port}")
    assert not await probe_worker(record, TOKEN, LOOPBACK_ONLY)
    server.close()


async def test_a_worker_of_another_model_is_not_kept_because_it_answers(
    world: World, model_info: ModelInfo
) -> None:
    """The model changes in an update: its old prefill workers, which refuse every call, stayed in
    use for as long as they lived, whether they were listed or not."""
    old = [prefill("p0", model_info), prefill("p1", model_info)]
    changed = msgspec.structs.replace(model_info, fingerprint="other")
    new = prefill("p2", changed)
    await world.look(old)
    await world.look(old[:1])  # the lease of p1 has lapsed; it answers
    used = world.registry.update([old[0], new], lambda record: record.model == changed)
    assert set(used) == {"p2"}
