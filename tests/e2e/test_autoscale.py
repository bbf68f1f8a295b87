"""An autoscaler that acts: a worker comes with the load and goes with it, and no stream notices.
Loans: `tests/workers/test_autoscale.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.lib.local_cluster import LocalCluster, baton, local_cluster
from bench.lib.oracle import Oracle
from cluster.sizing.decision import DecisionRecord, decode_record
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import WorkerCounts
from protocol.registry.directory import WorkerRecord
from tests.e2e.conftest import workers
from tests.e2e.up.test_cluster import as_request, body, http, prompts, stream

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(240)]

OPTIONS = {
    **{"threads": "1", "kv-precision": "exact", "speculation": "off", "max-batch": "5"},
    **{"autoscaler-mode": "act", "autoscaler-decode-max": "2", "autoscaler-prefill-max": "1"},
    **{"autoscaler-interval-s": "0.5", "autoscaler-window-s": "5", "autoscaler-warm-up-s": "0"},
    **{"autoscaler-down-after-s": "1", "autoscaler-down-every-s": "1"},
    **{"admission-ttft-ms": "60000", "admission-queue-ms": "60000"},  # one worker is too few
}
WAIT_S = 60.0

Told = list[tuple[dict[str, Any], list[int]]]


@pytest.fixture(scope="module")
def scaled() -> Iterator[LocalCluster]:
    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    with local_cluster(*words) as running:
        yield running


def decisions(cluster: LocalCluster) -> list[DecisionRecord]:
    whole = (Path(cluster.state.run_dir) / "decisions.jsonl").read_bytes().rpartition(b"\n")[0]
    return [decode_record(line) for line in whole.splitlines()]


async def until(cluster: LocalCluster, seen: Callable[[list[WorkerRecord]], bool]) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not seen([w for w in await workers(cluster) if not w.draining]):
                await asyncio.sleep(0.1)
    except TimeoutError:
        said = "\n".join(f"{r.decision.reason} {r.decision.text}" for r in decisions(cluster))
        raise AssertionError(f"not after {WAIT_S:.0f} s; decisions:\n{said}") from None


@contextlib.asynccontextmanager
async def asked_again_and_again(
    client: httpx.AsyncClient, requests: list[dict[str, Any]], pause_s: float = 0.0
) -> AsyncIterator[Told]:
    """Each of them by a client of its own; yields what they were told, of whole streams."""
    told: Told = []
    going = True

    async def ask(sent: dict[str, Any]) -> None:
        while going:
            told.append((sent, (await stream(client, sent))[0]))
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as clients:
        for each in requests:
            clients.create_task(ask(each))
        yield told
        going = False


async def test_workers_follow_the_load(scaled: LocalCluster, oracle: Oracle) -> None:
    long, *short = prompts(8, 100, 200, seed=21)
    always = body(scaled, 1, long, 150)
    load = [body(scaled, n, prompt, 100) for n, prompt in enumerate(short)]
    async with http(scaled) as client, asked_again_and_again(client, [always], 2.0) as told:
        async with asked_again_and_again(client, load) as busy:
            await until(scaled, lambda there: len(there) == 3)
        with pytest.raises(RuntimeError, match=r"autoscaler\.mode is act"):
            await asyncio.to_thread(baton, scaled.home, "scale", "decode=2")
        await until(scaled, lambda there: len(there) == 2)
    assert {w.role for w in await workers(scaled)} == {"prefill", "decode"}
    texts = oracle([as_request(sent) for sent in [always, *load]])
    right = {tuple(s["prompt"]): text for s, text in zip([always, *load], texts, strict=True)}
    assert len(told) > 2 and len(busy) >= len(load)
    for sent, tokens in [*told, *busy]:
        assert tokens == right[tuple(sent["prompt"])]


def test_every_decision_can_be_made_again(scaled: LocalCluster) -> None:
    records = decisions(scaled)
    assert "surplus" in {record.decision.reason for record in records}
    grown = [r for r in records if r.decision.targets.decode > r.snapshot.targets.decode]
    assert {r.decision.reason for r in grown} <= {"demand", "limit"} and grown
    assert records[0].snapshot.targets == WorkerCounts(prefill=1, decode=1)
    assert records[-1].snapshot.tuning.start_s < 60.0, "it was timed"
    for record in records:
        assert record.acted and decide(record.snapshot) == record.decision


def test_what_goes_wrong_is_in_the_logs_of_ray(scaled: LocalCluster) -> None:
    logs = Path(scaled.state.run_dir).glob("ray/session_2*/logs/worker-*.err")
    assert any("requests are counted from now on" in log.read_text() for log in logs)
