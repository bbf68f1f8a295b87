"""Two routers, two prefill and two decode workers: what was computed is found, by whom it may be.

And Redis under faults while requests flow: it costs no request, and the hits come back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from redis.exceptions import RedisError

from bench.lib.oracle import EXACT
from bench.lib.standalone import Standalone
from protocol.requests import request_digest
from router.placement.ledger import QueuedPrompts
from router.workers.decode_link import DecodeLink
from tests.e2e.asking import (
    Asker,
    Sent,
    Traffic,
    cached,
    candidates,
    predicted_cached,
    promised,
    prompt,
)
from tests.e2e.redis_faults import FAULTS, Fault

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(120)]

KEYS = {"sk-a1": "acme", "sk-a2": "acme", "sk-u": "umbrella"}
PATIENT = ("--admission-ttft-ms", "600000")
PREFIX = 256  # tokens
ADDED_S = 2.0  # that a fault of Redis may cost a request
BACK_S = 15.0  # in which the hits are back


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standalone]:
    folder = tmp_path_factory.mktemp("cache")
    keys = folder / "keys.yaml"
    lines = [f"{key}: {{tenant: {tenant}, scopes: [admin]}}\n" for key, tenant in KEYS.items()]
    keys.write_text("".join(lines))
    keys.chmod(0o600)
    options = (*PATIENT, "--api-keys", str(keys))
    pool = Standalone(folder, worker_options=EXACT, router_options=options, routers=2)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
    assert not pool.left()


@pytest.fixture(scope="module")
async def askers(pool: Standalone) -> AsyncIterator[dict[str, Asker]]:
    async with aiohttp.ClientSession() as session:
        yield {key: Asker(pool, session, key) for key in KEYS}


@pytest.fixture
def asker(askers: dict[str, Asker]) -> Asker:
    return askers["sk-a1"]


async def test_a_shared_prefix_is_prefilled_once(pool: Standalone, asker: Asker) -> None:
    shared = prompt(1, 320)
    before = await asker.told(0)
    assert cached(await asker.ask([*shared, *prompt(2, 40)], 0)) == 0
    known = await asker.told(before + 11)
    for i, router in enumerate((0, 1)):
        answer = await asker.ask([*shared, *prompt(3 + i, 40)], router)
        assert cached(answer) == predicted_cached(answer) == 320
    pool.restart_router(1)
    await pool.whole()
    await asker.told(known)  # from snapshots: nobody has asked this router yet
    answer = await asker.ask([*shared, *prompt(5, 40)], 1)
    assert cached(answer) == predicted_cached(answer) == 320


async def test_the_next_turn_finds_the_answer(asker: Asker) -> None:
    turn = prompt(10, 20)  # less than a block: nobody but who answers has any of it
    before = await asker.told(0)
    first = await asker.ask(turn, 0, count=241)
    await asker.told(before + 8)
    answer = first["choices"][0]["token_ids"]
    second = await asker.ask([*turn, *answer, *prompt(11, 40)], 1)
    assert cached(second) == predicted_cached(second) == 256, "8 blocks: 236 tokens of the answer"


async def test_tenants_share_nothing(askers: dict[str, Asker]) -> None:
    tokens = prompt(20, 330)
    before = await askers["sk-a1"].told(0)
    assert cached(await askers["sk-a1"].ask(tokens)) == 0
    await askers["sk-a1"].told(before + 10)
    for router in (0, 1):
        answer = await askers["sk-u"].ask(tokens, router, cache_salt=f"{router}")
        assert cached(answer) == predicted_cached(answer) == 0
        answer = await askers["sk-a1"].ask(tokens, router, cache_salt=f"{router}")
        assert cached(answer) == predicted_cached(answer) == 0
    assert cached(await askers["sk-u"].ask(tokens, 1)) == 0
    assert cached(await askers["sk-a2"].ask(tokens, 1)) == 320  # another key of the same tenant


async def test_who_shares_a_salt_shares_blocks(askers: dict[str, Asker]) -> None:
    tokens = prompt(21, 330)
    before = await askers["sk-a1"].told(0)
    assert cached(await askers["sk-a1"].ask(tokens, cache_salt="s")) == 0
    await askers["sk-a1"].told(before + 10)
    assert cached(await askers["sk-a2"].ask(tokens, 1, cache_salt="s")) == 320
    assert cached(await askers["sk-a2"].ask(tokens, 1)) == 0
    assert cached(await askers["sk-u"].ask(tokens, 1, cache_salt="s")) == 0


async def test_loads_name_the_prompts_that_a_worker_has_got(pool: Standalone, asker: Asker) -> None:
    """By the digest of the id that the router has sent, at the worker that computes the prompt."""
    named: dict[str, set[int]] = {}

    def on_load(instance: str, queued: QueuedPrompts, unseen: int) -> None:
        named.setdefault(instance, set()).update(queued.latest or ())

    token = pool.token
    links = [DecodeLink(r, token, lambda: None, on_load) for r in await pool.records()]
    for link in links:
        link.start()
    try:
        computed_by = {}
        for number in range(6):
            answer = await asker.ask(prompt(90 + number, 20 if number % 2 else 700), number % 2)
            chosen = answer["baton"]["attempts"][0]["chosen"]
            computed_by[request_digest(f"{answer['id']}.1")] = chosen["prefill"] or chosen["decode"]
        async with asyncio.timeout(5):
            while any(digest not in named.get(who, ()) for digest, who in computed_by.items()):
                await asyncio.sleep(0.05)
    finally:
        for link in links:
            await link.close()
    assert {r.role for r in await pool.records() if r.instance in computed_by.values()} == {
        "prefill",
        "decode",
    }


# ---- why it went there ----------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_explanation(pool: Standalone, streamed: bool) -> None:
    async with AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="sk-u") as client:
        began = time.monotonic()
        asked: Any = client.completions.create(
            model="baton-demo",
            prompt="def fibonacci(n):" * 40,
            max_tokens=8,
            stream=streamed,
            extra_body={"cache_salt": str(streamed), "ignore_eos": True},
            extra_headers={"x-baton-explain": "1"},
        )
        if streamed:
            chunks = [chunk async for chunk in await asked]
            assert not any("baton" in (chunk.model_extra or {}) for chunk in chunks[:-1])
            told = chunks[-1].model_extra["baton"]
        else:
            told = (await asked).model_extra["baton"]
        took_s = time.monotonic() - began
    assert told["policy"] == "cost"
    [attempt] = told["attempts"]
    records = await pool.records()
    named = {role: {r.instance for r in records if r.role == role} for role in pool.roles}
    pairs = {(c["prefill"], c["decode"]) for c in attempt["candidates"]}
    assert pairs == {(p, d) for p in (*named["prefill"], None) for d in named["decode"]}
    assert attempt["chosen"] in attempt["candidates"]
    for candidate in attempt["candidates"]:
        assert all(math.isfinite(term) and term >= 0 for term in candidate["predicted"].values())
        assert 0 < candidate["predicted"]["ttft_s"] < 10
    marks, seen = attempt["observed"]["timeline"], attempt["observed"]
    order = ["prefill_queued", "prefill_started", "first_token", "finished"]
    times = [marks[mark] for mark in order if mark in marks]
    assert times == sorted(times) and {"first_token", "finished"} <= marks.keys()
    assert 0 < marks["first_token"] <= seen["ttft_s"] <= took_s
    assert marks["finished"] <= took_s
    assert (seen["hand_over"] is None) == (attempt["chosen"]["prefill"] is None)


async def test_nobody_is_told_who_has_not_asked(pool: Standalone) -> None:
    async with AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="sk-u") as client:
        reply = await client.completions.create(model="baton-demo", prompt="x", max_tokens=2)
    assert not reply.model_extra


# ---- Redis under faults ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefixes() -> list[list[int]]:
    return [prompt(100 + i, PREFIX) for i in range(4)]


@pytest.fixture(scope="module")
async def calm(askers: dict[str, Asker], prefixes: list[list[int]]) -> list[Sent]:
    asker = askers["sk-a1"]
    for prefix in prefixes:
        await asker.ask([*prefix, 3])
    await asker.told(8 * len(prefixes))
    async with Traffic(asker, prefixes, routers=2) as traffic:
        await asyncio.sleep(3)
    assert all(sent.hits(PREFIX) for sent in traffic.sent)
    # Computing a short prefix again takes no longer than waiting for one step of who has it.
    assert sum(sent.cached == PREFIX for sent in traffic.sent) > len(traffic.sent) / 2
    return traffic.sent


async def listed(pool: Standalone) -> set[str]:
    try:
        return {r.instance for r in await pool.records()}
    except RedisError:  # the set of workers is none, until a worker puts that right
        return set()


async def complete(pool: Standalone, asker: Asker, instances: set[str]) -> None:
    """Until the directory has all workers again, and both routers know of them."""
    async with asyncio.timeout(BACK_S):
        while await listed(pool) != instances:
            await asyncio.sleep(0.1)
        for router in (0, 1):
            while len(candidates(await asker.ask([3], router))) < 6:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("fault", FAULTS)
async def test_redis_under_faults(
    pool: Standalone,
    asker: Asker,
    prefixes: list[list[int]],
    calm: list[Sent],
    fault: Fault,
) -> None:
    seed = 200 + 2 * FAULTS.index(fault)
    quiet, new = prompt(seed, PREFIX), prompt(seed + 1, PREFIX)
    before = await asker.told(0)
    await asker.ask([*quiet, 3])
    before = await asker.told(before + 8)
    instances = await listed(pool)
    async with Traffic(asker, prefixes, routers=2) as traffic:
        hurting = asyncio.create_task(fault(pool))
        await asyncio.sleep(0.3)
        await asker.ask([*new, 3], 0)  # Redis is not told, or forgets
        await hurting
        over = time.monotonic()
        await complete(pool, asker, instances)
        await asker.told(before + 8, BACK_S)
        back = time.monotonic()
        for tokens in (quiet, new):
            answer = await asker.ask([*tokens, 4], 1)
            assert predicted_cached(answer) == PREFIX
            assert cached(answer) >= promised(answer)
        await asyncio.sleep(1)
    missed = [s for s in traffic.sent if not s.hits(PREFIX)]
    slowest, usual = (max(s.seconds for s in sent) for sent in (traffic.sent, calm))
    print(
        f"{fault.__name__}: back in {back - over:.1f} s,"
        f" {len(missed)} of {len(traffic.sent)} missed,"
        f" slowest {slowest:.2f} s, {usual:.2f} s when calm"
    )
    assert slowest < usual + ADDED_S
    assert not any(s.began > back for s in missed)
