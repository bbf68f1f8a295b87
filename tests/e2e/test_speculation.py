"""Decode workers that speculate, each in its own way, one of them with a draft of no use: the texts
are those of one plain engine, and what they did is told."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientTimeout

from bench.lib.oracle import BUSY_ROUTER, EXACT, Oracle
from bench.lib.standalone import Standalone
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from router.overview.prometheus_text import MetricsPage, parse_page, sum_samples
from tests.e2e.asking import prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TOKENS = 40
REQUESTS = [(prompt(seed, 8) * (2 + seed % 12), 0.0 if seed % 2 else 0.8) for seed in range(24)]
"""Prompts that repeat themselves, and the temperature."""


class Mixed(Standalone):
    """A worker that prefills, and one that decodes with each of ``ways``."""

    def __init__(self, folder: Path, ways: list[list[str]]) -> None:
        roles = ["prefill", *("decode" for _ in ways)]
        super().__init__(folder, roles, EXACT, BUSY_ROUTER)
        self._ways = iter(ways)

    def _worker(self, role: str) -> subprocess.Popen[bytes]:
        way = next(self._ways) if role == "decode" else []
        options = ["--role", role, "--threads", "1", *self._worker_options, *way]
        return self._baton("worker", *options)


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mixed]:
    folder = tmp_path_factory.mktemp("spec")
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    ways = [
        ["--speculation", "ngram"],
        ["--speculation", "draft"],
        ["--speculation-model", str(broken)],
    ]
    pool = Mixed(folder, ways)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
    assert not pool.left()


async def ask(session: aiohttp.ClientSession, i: int) -> list[int]:
    tokens, temperature = REQUESTS[i]
    body = {"model": "baton-demo", "prompt": tokens, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"temperature": temperature, "seed": i, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        answer = await reply.json()
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
async def answers(pool: Mixed) -> list[list[int]]:
    """Eight at a time."""
    room = asyncio.Semaphore(8)
    timeout = ClientTimeout(60)
    async with aiohttp.ClientSession(pool.url, timeout=timeout) as session:

        async def one(i: int) -> list[int]:
            async with room:
                return await ask(session, i)

        found = await asyncio.gather(*(one(i) for i in range(len(REQUESTS))))
    await asyncio.sleep(0.7)  # a beat
    return list(found)


async def pages(pool: Mixed) -> dict[str, MetricsPage]:
    """Metrics of those that decode, by what proposes; of none: ''."""
    found = {}
    async with aiohttp.ClientSession() as session:
        for record in await pool.records():
            if record.role == "decode":
                async with session.get(f"http://{record.metrics_endpoint}/metrics") as reply:
                    page = parse_page(await reply.text())
                active = page.get("baton_spec_decode_active", [])
                found["".join(s.labels["proposer"] for s in active)] = page
    return found


def status(pool: Mixed) -> dict[str, Any]:
    command = [sys.executable, "-m", "cluster.cli.main", "status", "--json", "--url", pool.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(run.stdout))


async def test_texts_are_those_of_a_plain_engine(
    pool: Mixed, answers: list[list[int]], oracle: Oracle
) -> None:
    asked = []
    for i, (tokens, temperature) in enumerate(REQUESTS):
        sampling = SamplingParams(
            temperature=temperature, seed=i, max_tokens=TOKENS, ignore_eos=True
        )
        asked.append(
            Request(id=str(i), prompt=tuple(tokens), sampling=sampling, cache_root=bytes(16))
        )
    assert answers == oracle(asked)


async def test_metrics_tell_what_was_drafted(pool: Mixed, answers: list[list[int]]) -> None:
    found = await pages(pool)
    assert sorted(found) == ["", "draft", "ngram"]
    for name, page in found.items():
        drafts = sum_samples(page, "baton_spec_decode_num_drafts_total")
        drafted = sum_samples(page, "baton_spec_decode_num_draft_tokens_total")
        accepted = sum_samples(page, "baton_spec_decode_num_accepted_tokens_total")
        by_place = sum_samples(page, "baton_spec_decode_num_accepted_tokens_per_pos_total")
        assert sum_samples(page, "baton_generation_tokens_total") > TOKENS, "it had its share"
        assert drafted >= drafts >= 0 and drafted >= accepted == by_place
        assert (drafts > 0) == (name != "")
        assert sum_samples(page, "baton_spec_decode_drops_total", reason="load") == (name == "")
        assert sum_samples(page, "baton_spec_decode_drops_total", reason="crash") == 0


async def test_status_tells_it_too(pool: Mixed, answers: list[list[int]]) -> None:
    shown = await asyncio.to_thread(status, pool)
    prefill, *decode = shown["workers"]
    assert prefill["speculation"] is None
    by_name = {w["speculation"]["proposer"]: w["speculation"] for w in decode}
    assert by_name[""]["state"] == "dropped" and by_name[""]["acceptance"] is None
    for name in ("ngram", "draft"):
        assert by_name[name]["state"] == "active"
        assert 0 <= by_name[name]["acceptance"] <= 1
        assert 1 <= by_name[name]["tokens_per_step"] <= 17
    assert pool.said("speculation dropped: ") == 1, "the worker says why"
