"""Hand-overs whose KV travels by a collective library between two engine processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from protocol.requests import Request
from tests.workers.conftest import Oracle
from tests.workers.harness import Answer, attached, free_again, running, settings
from tests.workers.test_handover import mixed


async def ended(answers: Sequence[Answer]) -> None:
    async with asyncio.timeout(30):
        for answer in answers:
            await answer.ended.wait()


def transfers(worker: Worker) -> int:
    """Transfers by pairs into a worker, of which none failed."""
    rows = {row.carrier: row for row in worker._receiver.links.rows()}
    assert not rows["nccl"].failures
    return rows["nccl"].transfers


async def test_text_is_that_of_one_engine_also_when_the_sender_dies(
    model: Path, redis: EmbeddedRedis, oracle: Oracle
) -> None:
    both = [
        settings(role, redis, model, kv_carriers=("nccl",), trusted_fabric=True)
        for role in ("prefill", "decode")
    ]
    async with running(*both) as (p, d), attached(d, p) as client:
        requests: list[Request] = mixed(12)
        answers = [await client.submit(r) for r in requests]
        await ended(answers)
        assert [a.tokens for a in answers] == [oracle(r) for r in requests]
        assert transfers(d) == 12
        await free_again(p)
        await free_again(d)

        requests = mixed(6, length=500, first=200)
        answers = [await client.submit(r) for r in requests]
        await answers[0].first.wait()
        os.kill(p.record().engine_pid, signal.SIGKILL)
        await ended(answers)
        assert [a.tokens for a in answers] == [oracle(r) for r in requests]
        await free_again(d, 5.0)
