"""Routing over HTTP: the choice, its explanation, admission, tenants. Fake workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from bench.lib.routing_policies import POLICIES
from protocol.block_keys import block_keys, cache_root
from protocol.registry.directory import WorkerRecord
from protocol.wire import wire_pb2 as pb
from router.common.errors import MAX_RETRY_AFTER_S
from router.placement.choose import choose_placement
from tests.router.conftest import MODEL, Cluster, Start, served, until
from tests.router.fake_worker import outputs, silent
from tests.router.http.api.test_api import error_of
from tests.router.http.api.test_stream import frames, load_of
from tests.router.workers.test_workers import prefill

STEP = (0.01, 1e-4, 1e-7, 1e-3, 0.0)
PROMPT = [5 + i % 200 for i in range(640)]


async def pool_of(start: Start, decodes: int = 2, prefills: int = 2, **changes: Any) -> Cluster:
    """Workers that have told how long their steps take."""
    scripts = changes.pop("scripts", [outputs()] * decodes)
    cluster = await start(*scripts, **{"choose": choose_placement, **changes})
    names = [f"p{i}" for i in range(prefills)]
    cluster.prefill = [prefill(name, cluster.model, step_model=STEP) for name in names]
    await until(lambda: len(cluster.app.state.router.pool.prefill) == prefills)
    return cluster


def busy(cluster: Cluster, queued_tokens: int = 3000) -> None:
    """Decode workers on which no prompt had better be computed."""
    for link in cluster.app.state.router.pool.links.values():
        load = pb.Load(running=10, queued_tokens=queued_tokens)
        link._dispatch(pb.WorkerMessage(load=load))


def slow_links(cluster: Cluster) -> None:
    """So slow that fetching never pays."""
    cluster.app.state.router.estimates._typical = 1e6


def keys_of(cluster: Cluster, prompt: list[int], tenant: str = "default", salt: str = "") -> Any:
    model = cluster.model
    root = cache_root(cluster.settings.secret, tenant, model.fingerprint, model.precision, salt)
    return block_keys(root, prompt)


def holds(cluster: Cluster, instance: str, prompt: list[int], **of: str) -> None:
    cluster.app.state.router.index.store(instance, keys_of(cluster, prompt, **of))


def submits(cluster: Cluster) -> list[pb.Submit]:
    return [submit for worker in cluster.workers for submit in worker.requests]


def queue(cluster: Cluster, instance: str, tokens: int) -> None:
    """Somebody else's prompts at a worker."""
    for place, record in enumerate(cluster.prefill):
        if record.instance == instance:
            changed = msgspec.structs.replace(record, queued_tokens=tokens)
            cluster.prefill[place] = changed


async def queued(cluster: Cluster, instance: str, tokens: int) -> None:
    queue(cluster, instance, tokens)
    books = cluster.app.state.router.ledger
    await until(lambda: books.queue(instance).others == tokens)


# ---- the choice ----------------------------------------------------------------------------------


async def test_who_has_the_prefix_computes_the_rest(start: Start) -> None:
    cluster = await pool_of(start, prefills=3)
    busy(cluster)
    slow_links(cluster)
    for first in range(4):
        prompt = [5 + first, *PROMPT]
        holds(cluster, "p1", prompt)
        await cluster.post(prompt=prompt, max_tokens=100)
    named = [s.prefill[0].instance for s in submits(cluster)]
    assert named == ["p1"] * 4
    assert all(s.local_prefill_tokens == 32 for s in submits(cluster))
    uncached = [s.prefill[0].uncached_tokens for s in submits(cluster)]
    assert uncached == [1] * 4, "the last of 641 tokens, after 20 blocks"
    assert all(s.uncached_tokens == 1 + len(PROMPT) for s in submits(cluster)), "none cached at D"


async def test_a_busy_holder_is_asked_for_the_blocks_instead(start: Start) -> None:
    cluster = await pool_of(start)
    busy(cluster)
    holds(cluster, "p1", PROMPT)
    await queued(cluster, "p1", 5000)
    await cluster.post(prompt=PROMPT, max_tokens=2)
    [submit] = submits(cluster)
    first = submit.prefill[0]
    assert first.instance == "p0"
    fetch = first.fetch
    assert (fetch.instance, fetch.endpoint, fetch.blocks) == ("p1", "127.0.0.1:101", 19)


async def test_a_prompt_that_is_cached_at_a_decode_worker_stays_there(start: Start) -> None:
    cluster = await pool_of(start)
    holds(cluster, cluster.workers[1].instance, PROMPT)
    await cluster.post(prompt=PROMPT, max_tokens=2)
    [submit] = cluster.workers[1].requests
    assert not submit.prefill


async def test_what_left_with_its_worker_is_not_looked_for(start: Start) -> None:
    cluster = await pool_of(start)
    holds(cluster, "p1", PROMPT)
    cluster.prefill.pop()
    state = cluster.app.state.router
    await until(lambda: len(state.pool.prefill) == 1)
    assert state.index.match(keys_of(cluster, PROMPT)) == {}


@pytest.mark.parametrize("name", POLICIES)
async def test_every_policy_serves(start: Start, name: str) -> None:
    cluster = await pool_of(start, choose=POLICIES[name])
    for _ in range(4):
        assert (await cluster.post(prompt=PROMPT, max_tokens=2)).status_code == 200
    assert load_of(cluster) == 0
    if name == "round-robin":
        assert [len(w.requests) for w in cluster.workers] == [2, 2]


# ---- the explanation -----------------------------------------------------------------------------


def check_explained(told: dict[str, Any]) -> None:
    assert told["policy"] == "cost"
    assert told["objectives"] == {"ttft_s": 2.0, "tpot_s": 0.1}
    [attempt] = told["attempts"]
    assert attempt["chosen"] in attempt["candidates"]
    assert len(attempt["candidates"]) == 2 * (2 + 1)
    costs = [c["predicted"]["cost"] for c in attempt["candidates"]]
    assert costs == sorted(costs)
    for candidate in attempt["candidates"]:
        terms = candidate["predicted"]
        parts = ("ttft_cost", "tpot_cost", "imposed", "eviction")
        assert terms["cost"] == pytest.approx(sum(terms[part] for part in parts))
    seen = attempt["observed"]
    assert 0 < seen["ttft_s"] < 10
    assert seen["timeline"] == {"prefill_queued": 0.25, "first_token": 0.5, "finished": 1.0}
    assert seen["hand_over"]["kv_bytes"] == 640_000


async def accounting(request: pb.Request) -> AsyncIterator[pb.Output]:
    """A script: three tokens; the last message brings the worker's account."""
    yield pb.Output(id=request.id, tokens=[7])
    last = pb.Output(id=request.id, tokens=[8, 9], finish=pb.FINISH_LENGTH)
    for event, seconds in (("prefill_queued", 0.25), ("first_token", 0.5), ("finished", 1.0)):
        last.timeline.add(event=event, seconds=seconds)
    last.measured.prefill_instance = "p0"
    last.measured.kv_tokens, last.measured.kv_bytes = 640, 640_000
    last.measured.tail_bytes, last.measured.tail_seconds = 100_000, 0.1
    yield last


async def test_who_asks_is_told_why(start: Start) -> None:
    cluster = await pool_of(start, scripts=[accounting, accounting])
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
    asked = {"x-baton-explain": "1"}
    response = await cluster.client.post("/v1/completions", json=body, headers=asked)
    check_explained(response.json()["baton"])
    assert "baton" not in (await cluster.post(prompt=PROMPT, max_tokens=3)).json()


async def test_a_stream_tells_in_a_last_chunk(start: Start) -> None:
    cluster = await pool_of(start, scripts=[accounting, accounting])
    body = {"prompt": PROMPT, "max_tokens": 3, "stream_options": {"include_usage": True}}
    async with served(cluster.app) as url:
        events = await frames(url, headers={"x-baton-explain": "1"}, **body)
        assert events[-1] == "[DONE]"
        check_explained(events[-2]["baton"])
        assert (events[-2]["choices"], events[-2]["usage"]) == ([], None)
        assert events[-3]["usage"]["completion_tokens"] == 3
        assert not any("baton" in e for e in events[:-2])
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
        async with client:
            stream = await client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=3,
                stream=True,
                extra_headers={"x-baton-explain": "1"},
            )
            finishes = [c.finish_reason async for part in stream for c in part.choices]
    assert finishes[-1] == "length"


async def test_what_workers_account_for_is_learnt(start: Start) -> None:
    cluster = await pool_of(start, decodes=1, scripts=[accounting], prefills=1)
    busy(cluster)
    learned = cluster.app.state.router.estimates
    for _ in range(3):
        await cluster.post(prompt=PROMPT, max_tokens=3)
    [worker] = cluster.workers
    assert learned.network({}).share("p0", worker.instance) == pytest.approx(1e6)
    assert learned.kv_bytes(1) == pytest.approx(1000)
    assert learned.correction("p0") < 1.0, "the first tokens came sooner than predicted"
    page = (await cluster.client.get("/metrics")).text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if not line.startswith("#")
    }
    of = f'{{model="{MODEL}",role="router"}}'
    assert values[f"baton_router_decision_seconds_count{of}"] == 3
    assert values[f"baton_prefix_cache_queries_tokens_total{of}"] == 3 * 640
    assert values[f'baton_slo_met_total{{model="{MODEL}",role="router",slo="ttft"}}'] == 3
    replica = cluster.app.state.router.registration.instance[:12]
    gauge = f'{{model="{MODEL}",replica="{replica}",role="router"}}'
    assert values[f"baton_index_entries{gauge}"] == 0
    stage = f'baton_ttft_stage_seconds_count{{model="{MODEL}",role="router",stage="route"}}'
    assert values[stage] == 3


async def test_every_attempt_is_told(start: Start) -> None:
    turns = iter([outputs(error_after=0), outputs()])

    async def in_turn(request: pb.Request) -> AsyncIterator[pb.Output]:
        async for output in next(turns)(request):
            yield output

    cluster = await pool_of(start, scripts=[in_turn], decodes=1)
    headers = {"x-baton-explain": "1"}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
    told = (await cluster.client.post("/v1/completions", json=body, headers=headers)).json()
    assert len(told["baton"]["attempts"]) == 2


# ---- admission -----------------------------------------------------------------------------------


async def refused_at_once(cluster: Cluster, prompt: str | list[int]) -> httpx.Response:
    """The last of five refusals. Waiting would delay each of them, and a busy machine only some: so
    the quickest is what is timed."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        response = await cluster.post(prompt=prompt)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.1
    return response


async def test_too_long_a_queue_is_a_429_that_says_when_to_come_back(start: Start) -> None:
    cluster = await pool_of(start, prefills=1)
    await queued(cluster, "p0", 60_000)  # 60 s
    busy(cluster, 90_000)
    response = await refused_at_once(cluster, PROMPT)
    assert response.status_code == 429
    assert error_of(response)["code"] == "overloaded"
    assert 5 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER_S
    assert not submits(cluster) and load_of(cluster) == 0
    patient = {"x-baton-ttft-deadline-ms": "60000"}
    body = {"model": MODEL, "prompt": PROMPT}
    response = await cluster.client.post("/v1/completions", json=body, headers=patient)
    assert response.status_code == 429, "a client's deadline does not lift the operator's"
    await queued(cluster, "p0", 0)
    assert (await cluster.post(prompt=PROMPT)).status_code == 200


async def test_a_long_prompt_is_no_queue(start: Start) -> None:
    cluster = await pool_of(start, prefills=1, admission_queue_ms=1500.0)
    assert (await cluster.post(prompt=[5] * 4000)).status_code == 200, "4 s, twice the objective"
    await queued(cluster, "p0", 2000)  # 2 s
    busy(cluster, 90_000)
    assert (await cluster.post(prompt=[6] * 40)).status_code == 200, "beside the long one"
    response = await cluster.post(prompt=[6] * 400)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert "queue" in error_of(response)["message"]


@pytest.mark.parametrize("given", ["0", "-5", "soon", "nan", "inf"])
async def test_a_deadline_that_is_none(start: Start, given: str) -> None:
    cluster = await pool_of(start)
    response = await cluster.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": PROMPT},
        headers={"x-baton-ttft-deadline-ms": given},
    )
    assert response.status_code == 400
    assert error_of(response)["param"] == "x-baton-ttft-deadline-ms"


async def test_priorities_give_a_tenant_no_more_places(start: Start) -> None:
    cluster = await pool_of(start, scripts=[silent, silent], max_requests=2)
    tasks = [asyncio.create_task(cluster.post(prompt="hi")) for _ in range(2)]
    await until(lambda: len(submits(cluster)) == 2)
    response = await refused_at_once(cluster, "hi")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    for priority in (-100, -1, 100):
        assert (await cluster.post(prompt="hi", priority=priority)).status_code == 429
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert load_of(cluster) == 0


async def test_no_worker_is_a_fast_503(start: Start) -> None:
    cluster = await start(choose=choose_placement)
    response = await refused_at_once(cluster, PROMPT)
    assert response.status_code == 503
    assert error_of(response)["code"] == "no_worker"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("given", [101, -101, "high", 1.5])
async def test_a_priority_that_is_none(start: Start, given: object) -> None:
    cluster = await start(outputs())
    response = await cluster.post(prompt="hi", priority=given)
    assert response.status_code == 400
    assert error_of(response)["param"] == "priority"


async def waiting_pool(
    start: Start, tokens: int = 4000, **changes: Any
) -> tuple[Cluster, list[asyncio.Task[Any]]]:
    """A worker that computes one prompt, a millisecond for each token, and three prompts that wait
    for it. Its answer never comes."""
    cluster = await pool_of(start, prefills=1, decodes=1, scripts=[silent], **changes)
    busy(cluster, 90_000)
    bodies = [{"prompt": [5 + first] * tokens, "max_tokens": 2} for first in range(4)]
    tasks = [asyncio.create_task(cluster.post(**body)) for body in bodies]
    queue = cluster.app.state.router.dispatcher.queue
    await until(lambda: queue.length == 3 and len(submits(cluster)) == 1)
    return cluster, tasks


async def test_urgent_requests_do_not_wait_behind_others(start: Start) -> None:
    cluster, tasks = await waiting_pool(start)
    urgent = asyncio.create_task(cluster.post(prompt=[9] * 4000, max_tokens=2, priority=-5))
    await until(lambda: len(submits(cluster)) == 2)
    assert submits(cluster)[1].request.priority == -5
    for task in (*tasks, urgent):
        task.cancel()
    await asyncio.gather(*tasks, urgent, return_exceptions=True)
    assert load_of(cluster) == 0


async def test_a_client_that_hangs_up_leaves_the_queue(start: Start) -> None:
    cluster = await pool_of(start, prefills=1, decodes=1, scripts=[silent])
    busy(cluster, 90_000)
    queue = cluster.app.state.router.dispatcher.queue
    async with served(cluster.app) as url:
        bodies = [{"model": MODEL, "prompt": [n] * 4000, "stream": True} for n in (5, 6, 7)]
        async with httpx.AsyncClient(base_url=url) as client:
            clients = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies
            ]
            await until(lambda: queue.length == 2)
            for task in clients:
                task.cancel()
            await until(lambda: queue.length == 0 and load_of(cluster) == 0)
    assert len(submits(cluster)) == 1, "nothing was sent for those that had left"


async def test_what_waits_too_long_is_a_429_at_its_deadline(start: Start) -> None:
    cluster, tasks = await waiting_pool(start, tokens=640)
    began = time.perf_counter()
    response = await cluster.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": PROMPT},
        headers={"x-baton-ttft-deadline-ms": "1600"},
    )
    assert response.status_code == 429
    assert "waited" in error_of(response)["message"] and "retry-after" in response.headers
    assert 0.3 < time.perf_counter() - began < 1.6, "as soon as it cannot come in time"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert load_of(cluster) == 0


async def test_time_before_the_first_token_counts_while_a_request_waits(start: Start) -> None:
    cluster, tasks = await waiting_pool(start, first_token_timeout_s=0.5)
    responses = await asyncio.gather(*tasks)
    assert [response.status_code for response in responses] == [504] * 4
    assert load_of(cluster) == 0


# ---- tenants -------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"sk-a": "a", "sk-b": {"tenant": "b", "priority": 5}}))
    path.chmod(0o600)
    return str(path)


async def ask(cluster: Cluster, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    full = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, **body}
    return await cluster.client.post("/v1/completions", json=full, headers=headers)


async def test_without_a_known_key_nothing_is_served(start: Start, keys: str) -> None:
    cluster = await pool_of(start, api_keys=keys)
    for response in (
        await ask(cluster, None),
        await ask(cluster, "sk-c"),
        await cluster.client.get("/v1/models"),
        await cluster.client.get(f"/v1/models/{MODEL}"),
    ):
        assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert (await cluster.client.get("/health")).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        async with served(cluster.app) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-c", max_retries=0)
            async with client:
                await client.completions.create(model=MODEL, prompt="hi")


async def test_tenants_share_no_block(start: Start, keys: str) -> None:
    cluster = await pool_of(start, api_keys=keys)
    for key in ("sk-a", "sk-a", "sk-b"):
        assert (await ask(cluster, key, priority=5)).status_code == 200
    assert (await ask(cluster, "sk-a", cache_salt="x")).status_code == 200
    assert (await ask(cluster, "sk-a", cache_salt="y")).status_code == 200
    roots = [s.request.cache_root for s in sorted(submits(cluster), key=lambda s: s.request.id)]
    assert len(set(roots)) == 4
    model = cluster.model
    wanted = {
        cache_root(cluster.settings.secret, tenant, model.fingerprint, model.precision, salt)
        for tenant, salt in (("a", ""), ("b", ""), ("a", "x"), ("a", "y"))
    }
    assert set(roots) == wanted


async def test_a_tenant_does_not_see_what_another_has_cached(start: Start, keys: str) -> None:
    cluster = await pool_of(start, api_keys=keys, prefills=2)
    busy(cluster)
    slow_links(cluster)
    holds(cluster, "p0", PROMPT, tenant="a")
    holds(cluster, "p1", PROMPT, tenant="b")
    for _ in range(3):
        await ask(cluster, "sk-a")
    assert {s.prefill[0].instance for s in submits(cluster)} == {"p0"}
    for worker in cluster.workers:
        worker.requests.clear()
    for _ in range(3):
        await ask(cluster, "sk-b", priority=5)
    assert {s.prefill[0].instance for s in submits(cluster)} == {"p1"}


async def test_a_priority_that_is_not_the_tenants(start: Start, keys: str) -> None:
    cluster = await pool_of(start, api_keys=keys)
    assert (await ask(cluster, "sk-b")).status_code == 400
    assert (await ask(cluster, "sk-b", priority=5)).status_code == 200
    assert (await ask(cluster, "sk-a", priority=-1)).status_code == 400
    assert (await ask(cluster, "sk-a", priority=0)).status_code == 200


@pytest.mark.parametrize("given", ["", 5, "x" * 300])
async def test_a_salt_that_is_none(start: Start, given: object) -> None:
    cluster = await start(outputs())
    response = await cluster.post(prompt="hi", cache_salt=given)
    assert response.status_code == 400
    assert error_of(response)["param"] == "cache_salt"


def test_a_worker_record_says_how_large_its_steps_are() -> None:
    fields = set(WorkerRecord.__struct_fields__)
    assert {"max_batch", "prefill_chunk"} <= fields
