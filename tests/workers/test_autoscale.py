"""An autoscaler beside a real worker, without Ray: it lends it, is watched, and sends it home."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from msgspec.structs import replace

from bench.lib.settings import autoscaler_settings
from cluster.autoscale.process import AutoscalerService
from cluster.autoscale.replica_counts import FixedReplicas
from cluster.local.redis_server import EmbeddedRedis
from cluster.sizing.decision import Loan, ScalingDecision, decode_record
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import SizingSnapshot
from protocol.registry.directory import Directory
from protocol.registry.redis_client import connect
from tests.workers.harness import TOKEN, running, settings


def lend_all(snapshot: SizingSnapshot) -> ScalingDecision:
    """Every prefill worker is wanted for decode; and one that is not there."""
    names = [w.instance for w in snapshot.workers if w.role == "prefill"]
    loans = tuple(Loan(instance=name, role="decode") for name in [*names, "nobody"])
    return replace(decide(snapshot), loans=loans if names else (), reason="loan")


async def test_it_lends_and_takes_back(model: Path, tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    redis.start()
    client = connect(redis.url)
    said: list[str] = []
    wanted = autoscaler_settings(
        cluster="test",
        redis_url=redis.url,
        token=TOKEN,
        mode="act",
        interval_s=0.5,
        loan_drain_s=0.2,
        log=str(tmp_path / "decisions.jsonl"),
    )
    one = AutoscalerService(wanted, FixedReplicas(), said.append, lend_all)
    two = AutoscalerService(
        replace(wanted, log=str(tmp_path / "two")), FixedReplicas(), said.append
    )
    async with running(settings("prefill", redis, model)) as [worker], asyncio.timeout(60):
        await one.start()
        while worker.record().role != "decode":
            await asyncio.sleep(0.02)
        assert worker.record().home == "prefill"
        await two.start()
        while len(listed := await Directory(client, "test").autoscalers.all()) < 2:
            await asyncio.sleep(0.02)
        assert {record.model for record in listed} == {"tiny"}
        assert 'mode="act",model="tiny"' in await mode(one._endpoint)
        assert 'mode="watch",model="tiny"' in await mode(two._endpoint)
        assert one.problem() is None and two.problem() is None
        await one.stop()
        assert worker.record().role == "prefill", "whom it lent is home"
        while 'mode="act"' not in await mode(two._endpoint):  # what was given back is taken
            await asyncio.sleep(0.05)
        await two.stop()
    records = [decode_record(line) for line in one.log_path.read_bytes().splitlines()]
    assert all(lend_all(record.snapshot) == record.decision for record in records)
    assert f"{worker.instance[:8]} prefill->decode" in said[0]
    assert not await Directory(client, "test").autoscalers.all()
    await client.aclose()
    redis.stop()


async def mode(endpoint: str) -> str:
    """The line of its page that says what it does; empty before its first turn."""
    url = f"http://{endpoint}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        page = await reply.text()
    lines = [line for line in page.splitlines() if line.startswith("baton_autoscaler_mode")]
    return next((line for line in lines if line.endswith(" 1.0")), "")
