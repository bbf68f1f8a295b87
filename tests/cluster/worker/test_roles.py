"""Asking a worker to take the other role: over a real connection, at a worker without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from bench.lib.settings import engine_settings
from cluster.autoscale.loans import RoleChange, request_role_change
from cluster.worker.role_service import RoleService
from decode_worker.request import DecodeRequest
from decode_worker.router_link import RouterLink
from decode_worker.service import DecodeService
from engine.process.client import EngineClient
from kvtransfer.receiver_context import KVReceiver
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY
from protocol.errors import Unavailable
from protocol.roles import Role
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.wire import wire_pb2_grpc as rpc
from tests.router.conftest import until

TOKEN, INSTANCE = "t" * 32, "i" * 32


class OneJob:
    """A request that runs until it is handed over."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        self.why = ""

    def hand_back(self, why: str) -> None:
        self.why = why
        self._link.requests.clear()


class Served:
    """A worker's Roles with all that they change, but for the engine process."""

    def __init__(self, home: Role) -> None:
        spec = engine_settings("", home)
        self.engine = EngineClient(["none"], spec, lambda *_: None)
        self.decode = DecodeService(self.engine, cast("KVReceiver", None), INSTANCE)
        self.records: list[tuple[str, bool]] = []
        self.said: list[str] = []
        self.roles = RoleService(
            home, INSTANCE, self.engine, self.decode, self._changed, self.said.append
        )
        self.endpoint = ""

    def _changed(self) -> None:
        self.records.append((self.roles.role, self.roles.changing))

    def work(self) -> OneJob:
        link = RouterLink()
        job = OneJob(link)
        link.requests["r"] = cast("DecodeRequest", job)
        self.decode._links.add(link)
        return job

    async def lend(self, role: str, drain_s: float = 0.0, **changes: Any) -> RoleChange:
        to = {"endpoint": self.endpoint, "instance": INSTANCE, "role": role}
        how = {"drain_s": drain_s, "token": TOKEN, "security": LOOPBACK_ONLY}
        return await request_role_change(**{**to, **how, **changes})


@contextlib.asynccontextmanager
async def served(home: Role) -> AsyncIterator[Served]:
    worker = Served(home)
    server = grpc.aio.server(interceptors=[AsyncTokenGuard(TOKEN)])
    rpc.add_RolesServicer_to_server(worker.roles, server)
    worker.endpoint = LOOPBACK_ONLY.listen(server, "127.0.0.1", 0)
    await server.start()
    yield worker
    await server.stop(None)


async def test_there_and_back() -> None:
    async with served("prefill") as worker:
        there = await worker.lend("decode")
        assert (there.role, there.handed_over) == ("decode", 0) and 0 < there.seconds < 1
        assert not worker.decode.draining and worker.engine._settings.role == "decode"
        assert await worker.lend("decode") == RoleChange("decode", 0.0, 0), "it has this role"
        assert (await worker.lend("prefill", 9.0)).role == "prefill", "nothing ran: no wait"
        assert worker.decode.draining and worker.engine._settings.role == "prefill"
        assert worker.records == [("decode", False), ("decode", True), ("prefill", False)]
        assert worker.roles.role_changes == {("prefill", "decode"): 1, ("decode", "prefill"): 1}


async def test_a_worker_says_when_it_is_lent_and_when_it_is_back() -> None:
    async with served("decode") as worker:
        worker.work()
        lent = await worker.lend("prefill", 0.1)
        await worker.lend("prefill")  # it has this role
        back = await worker.lend("decode")
        who = f"decode worker {INSTANCE[:8]} is"
        assert worker.said == [
            f"{who} lent: decode -> prefill in {lent.seconds:.2f} s, streams handed over: 1",
            f"{who} back: prefill -> decode in {back.seconds:.2f} s",
        ]


async def test_streams_have_time_to_end_before_they_are_handed_over() -> None:
    async with served("decode") as worker:
        job = worker.work()
        asyncio.get_running_loop().call_later(0.1, job.hand_back, "it has ended")
        lent = await worker.lend("prefill", 5.0)
        assert job.why == "it has ended" and lent.handed_over == 0 and 0.09 < lent.seconds < 2
        await worker.lend("decode")
        job = worker.work()
        lent = await worker.lend("prefill", 0.1)
        assert "lent" in job.why and lent.handed_over == 1 and 0.09 < lent.seconds < 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"role": "router"}, "INVALID_ARGUMENT role must be 'prefill' or 'decode', not 'router'"),
        ({"drain_s": -1.0}, "INVALID_ARGUMENT drain_seconds must be in 0..3600, not -1"),
        ({"drain_s": float("nan")}, "INVALID_ARGUMENT drain_seconds .* not nan"),
        ({"instance": "j" * 32}, "FAILED_PRECONDITION another worker is running at this address"),
        ({"token": "wrong"}, "UNAUTHENTICATED"),
        ({"endpoint": "127.0.0.1:1"}, "UNAVAILABLE"),
        ({"endpoint": "192.0.2.1:1"}, "not on this machine"),
    ],
)
async def test_who_asks_for_the_wrong_thing(changes: dict[str, Any], why: str) -> None:
    async with served("decode") as worker:
        with pytest.raises(Unavailable, match=why):
            await worker.lend(**{"role": "prefill", "deadline_s": 5.0, **changes})
        assert worker.roles.role == "decode" and not worker.records


async def test_one_change_at_a_time() -> None:
    async with served("decode") as worker:
        worker.work()
        change = asyncio.create_task(worker.lend("prefill", 0.3))
        await until(lambda: worker.roles.changing)
        for role in ("prefill", "decode"):
            with pytest.raises(Unavailable, match="ABORTED a change of its role is in progress"):
                await worker.lend(role)
        assert (await change).handed_over == 1
        assert (await worker.lend("decode")).role == "decode"


async def test_a_caller_that_goes_away_stops_no_change() -> None:
    async with served("decode") as worker:
        worker.work()
        with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
            await worker.lend("prefill", 0.3, deadline_s=0.1)
        assert worker.roles.changing
        await until(lambda: worker.roles.role == "prefill")
        assert not worker.roles.changing and not worker.decode.request_count


async def test_a_worker_that_goes_keeps_its_role() -> None:
    async with served("decode") as worker:
        job = worker.work()
        change = asyncio.create_task(worker.lend("prefill", 60.0))
        await until(lambda: worker.roles.changing)
        began = time.monotonic()
        worker.roles.leave()
        with pytest.raises(Unavailable, match="FAILED_PRECONDITION this worker is stopping"):
            await change
        assert time.monotonic() - began < 5
        assert worker.roles.role == "decode" and not worker.roles.changing
        assert worker.decode.draining and not job.why, "its own drain has longer"
        with pytest.raises(Unavailable, match="this worker is stopping"):
            await worker.lend("prefill")
