"""Tenants at a router's API: priorities, deadlines, scopes, revoked keys, limits, usage."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http.intake import _admission_limits
from router.placement.admission import AdmissionLimits
from router.tenants.key_store import KeyFileChanges
from tests.router.conftest import MODEL, Cluster, Start, until
from tests.router.fake_worker import outputs

WriteKeys = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path) -> WriteKeys:
    """Write a file of keys: of each keyword's tenant, with these fields."""

    def write(**tenants: dict[str, Any]) -> str:
        path = tmp_path / "keys.json"
        entries = {f"sk-{name}": {"tenant": name, **fields} for name, fields in tenants.items()}
        new = tmp_path / "new"
        new.write_text(json.dumps(entries))
        new.chmod(0o600)
        new.replace(path)
        return str(path)

    return write


async def ask(cluster: Cluster, tenant: str, headers: Any = None, **body: Any) -> httpx.Response:
    return await cluster.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "hi there", "max_tokens": 3, **body},
        headers={"authorization": f"Bearer sk-{tenant}", **(headers or {})},
    )


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    return error


def metric(page: str, name: str) -> dict[str, float]:
    """Values of a metric by tenant."""
    found = {}
    for line in page.splitlines():
        if line.startswith(f"{name}{{"):
            labels, value = line.rsplit(" ", 1)
            found[labels.partition('tenant="')[2].partition('"')[0]] = float(value)
    return found


async def test_keys_without_a_priority_are_not_more_urgent_than_others(
    start: Start, keys: WriteKeys
) -> None:
    cluster = await start(outputs(), api_keys=keys(acme={}, boss={"priority": -7}))
    reply = await ask(cluster, "acme", priority=-1)
    assert reply.status_code == 400
    assert "at least 0 with this API key" in error_of(reply)["message"]
    assert (await ask(cluster, "acme", priority=0)).status_code == 200
    assert (await ask(cluster, "boss", priority=-7)).status_code == 200


@pytest.mark.parametrize(
    ("given", "ttft_s"), [(None, 20.0), ("1e12", 20.0), ("20001", 20.0), ("50", 0.05)]
)
def test_a_deadline_may_only_tighten_the_operators_limits(given: str | None, ttft_s: float) -> None:
    headers = [] if given is None else [(b"x-baton-ttft-deadline-ms", given.encode())]
    request: Any = httpx.Request("POST", "http://router", headers=headers)
    default = AdmissionLimits(20.0, 1.5)
    assert _admission_limits(request, default) == default._replace(ttft_s=ttft_s)
    unbounded = AdmissionLimits(20.0, math.inf)
    assert _admission_limits(request, unbounded) == unbounded._replace(ttft_s=ttft_s)


async def test_scopes_decide_what_a_key_opens(start: Start, keys: WriteKeys) -> None:
    cluster = await start(
        outputs(),
        api_keys=keys(
            use={},
            look={"scopes": ["monitor"]},
            both={"scopes": ["admin"]},
            two={"scopes": ["generate", "monitor"]},
        ),
    )
    for tenant, opens in (("use", "g"), ("look", "m"), ("both", "gm"), ("two", "gm")):
        headers = {"authorization": f"Bearer sk-{tenant}"}
        for path in ("/metrics", "/sd", "/ui/overview"):
            reply = await cluster.client.get(path, headers=headers)
            assert reply.status_code == (200 if "m" in opens else 403), (tenant, path)
        assert (await cluster.client.get("/v1/models", headers=headers)).status_code == 200
        reply = await ask(cluster, tenant)
        assert reply.status_code == (200 if "g" in opens else 403)
        if "g" not in opens:
            error = error_of(reply)
            assert (error["type"], error["code"]) == ("permission_error", "insufficient_scope")
            assert "scope 'generate'" in error["message"] and "monitor" in error["message"]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": "Bearer sk-look"}
    reply = await cluster.client.post("/v1/chat/completions", json=chat, headers=headers)
    assert reply.status_code == 403
    assert all(len(worker.requests) == 3 for worker in cluster.workers)


async def test_a_revoked_key_is_refused_and_its_running_request_goes_on(
    start: Start, keys: WriteKeys
) -> None:
    cluster = await start(outputs(delay=0.1), api_keys=keys(acme={}, evil={}))
    store = cluster.app.state.router.tenants.keys
    changes = KeyFileChanges(cluster.settings.api_keys or "")
    running = asyncio.create_task(ask(cluster, "evil"))
    await until(lambda: any(worker.requests for worker in cluster.workers))
    keys(acme={})
    for _ in range(2):
        if (found := changes.check()) is not None:
            store.use(found)
    assert (await ask(cluster, "evil")).status_code == 401
    assert not running.done()
    assert (await running).json()["usage"]["completion_tokens"] == 3
    assert (await ask(cluster, "acme")).status_code == 200


async def test_the_router_itself_looks_at_the_file(start: Start, keys: WriteKeys) -> None:
    cluster = await start(outputs(), api_keys=keys(acme={}, evil={}))
    tenants = cluster.app.state.router.tenants
    tenants.keys._check_s = 0.02  # from the second look on
    keys(acme={"scopes": ["admin"]})
    await until(lambda: "evil" not in tenants.keys.tenants)
    assert (await ask(cluster, "evil")).status_code == 401
    keys(acme={"scopes": ["none"]})
    await until(lambda: not tenants.keys.valid)
    headers = {"authorization": "Bearer sk-acme"}
    page = (await cluster.client.get("/metrics", headers=headers)).text
    [line] = [each for each in page.splitlines() if each.startswith("baton_api_keys_valid{")]
    assert line.endswith(" 0.0")


async def test_limits_and_their_headers(start: Start, keys: WriteKeys) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 60, "concurrency": 3}
    cluster = await start(outputs(), api_keys=keys(acme=limits, free={}))
    reply = await ask(cluster, "acme")
    usage = reply.json()["usage"]
    assert reply.status_code == 200 and usage["completion_tokens"] == 3
    assert reply.headers["x-ratelimit-limit-requests"] == "2"
    assert reply.headers["x-ratelimit-remaining-requests"] == "1"
    assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
    remaining = 60 - usage["prompt_tokens"]  # the head goes out before the output is counted
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) - remaining in (0, 1)
    wrong = await ask(cluster, "acme", temperature=-1)
    assert wrong.status_code == 400, "it counts as a request, as at OpenAI"
    assert wrong.headers["x-ratelimit-remaining-requests"] == "0"
    remaining = 60 - usage["total_tokens"]
    assert int(wrong.headers["x-ratelimit-remaining-tokens"]) - remaining in (0, 1, 2)
    reply = await ask(cluster, "acme")
    assert (reply.status_code, error_of(reply)["code"]) == (429, "rate_limit_exceeded")
    assert reply.headers["retry-after"] in ("29", "30")
    assert reply.headers["x-ratelimit-limit-tokens"] == "60"
    reply = await ask(cluster, "free")
    assert reply.status_code == 200
    assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


async def test_concurrency_is_refused_before_anything_runs(start: Start, keys: WriteKeys) -> None:
    cluster = await start(outputs(), api_keys=keys(acme={"concurrency": 3}))
    quotas = cluster.app.state.router.tenants.quotas
    assert (await ask(cluster, "acme", n=3)).status_code == 200
    assert (await ask(cluster, "acme", n=4)).status_code == 400
    assert quotas.running() == {}
    quotas.set_running_elsewhere({"acme": 1})
    reply = await ask(cluster, "acme", n=3)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert (await ask(cluster, "acme", n=2)).status_code == 200
    assert quotas.running() == {}
    assert sum(len(worker.requests) for worker in cluster.workers) == 5


async def test_a_request_that_no_worker_computes_gives_its_tokens_back(
    start: Start, keys: WriteKeys
) -> None:
    api_keys = keys(acme={"tokens_per_minute": 6000})
    cluster = await start(outputs(), api_keys=api_keys, admission_ttft_ms=1e-6)
    reply = await ask(cluster, "acme")
    assert (reply.status_code, error_of(reply)["code"]) == (429, "overloaded")
    assert reply.headers["x-ratelimit-limit-tokens"] == "6000"
    assert cluster.app.state.router.tenants.quotas._quotas["acme"].tokens._level == 6000
    assert cluster.app.state.router.tenants.book.own()["acme"].prompt_tokens == 0


async def test_usage_in_metrics_and_in_the_log(
    start: Start, keys: WriteKeys, tmp_path: Path
) -> None:
    log = tmp_path / "usage.jsonl"
    api_keys = keys(acme={}, look={"scopes": ["monitor"]}, slow={"requests_per_minute": 1})
    cluster = await start(outputs(), api_keys=api_keys, usage_log=str(log))
    for _ in range(2):
        reply = await ask(cluster, "acme", n=2)
        assert reply.status_code == 200
    assert [(await ask(cluster, "slow")).status_code for _ in range(2)] == [200, 429]
    headers = {"authorization": "Bearer sk-look"}
    page = (await cluster.client.get("/metrics", headers=headers)).text
    usage = reply.json()["usage"]
    prompt = float(usage["prompt_tokens"])
    assert metric(page, "baton_tenant_requests_total") == {"acme": 2.0, "slow": 1.0}
    assert metric(page, "baton_tenant_refusals_total") == {"slow": 1.0}
    assert metric(page, "baton_tenant_prompt_tokens_total") == {"acme": 2 * prompt, "slow": prompt}
    assert metric(page, "baton_tenant_output_tokens_total") == {"acme": 12.0, "slow": 3.0}
    own = cluster.app.state.router.tenants.book.own()["acme"]
    assert (own.requests, own.prompt_tokens, own.output_tokens) == (2, 2 * prompt, 12)
    await cluster.app.state.router.tenants.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["tenant"] for line in lines] == ["acme", "acme", "slow"]
    assert lines[1] | {"time": 0} == {
        **{"time": 0, "tenant": "acme", "request_id": reply.json()["id"], "status": "ok"},
        **{"prompt_tokens": prompt, "cached_tokens": 0, "output_tokens": 6},
    }


async def test_tenants_that_the_file_drops_leave_the_metrics(start: Start, keys: WriteKeys) -> None:
    scopes = {"scopes": ["admin"]}
    cluster = await start(outputs(), api_keys=keys(a=scopes, b={}))
    tenants = cluster.app.state.router.tenants
    tenants.keys._check_s = 0.02
    for tenant in ("a", "b"):
        assert (await ask(cluster, tenant)).status_code == 200
    keys(a=scopes)
    await until(lambda: list(tenants.keys.tenants) == ["a"])
    page = (await cluster.client.get("/metrics", headers={"authorization": "Bearer sk-a"})).text
    assert metric(page, "baton_tenant_requests_total") == {"a": 1.0}
    assert set(tenants.book.own()) == {"a"}
