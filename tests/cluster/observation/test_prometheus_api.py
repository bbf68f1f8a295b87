"""Requests counted by a Prometheus: the query, by its own judge; answers, of a server that lies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from yarl import URL

from cluster.observation import prometheus_api
from cluster.observation.prometheus_api import PrometheusApi, build_query, check_prometheus_url
from protocol.errors import StartupError, Unavailable
from tests.cluster.promtool import promtool
from tests.system import needs

OF = 'cluster="c", role="router"'


def test_the_query_is_what_prometheus_takes(tmp_path: Path) -> None:
    needs("promtool")
    series = {
        f"baton_requests_received_total{{{OF}}}": "0+10x24",  # a sample each 5 s
        f"baton_requests_received_total{{{OF}, replica='b'}}": "0+5x24",
        "baton_requests_received_total{cluster='other'}": "0+99x24",
        f'baton_request_prompt_tokens_bucket{{{OF}, le="16"}}': "0+5x24",
        f'baton_request_prompt_tokens_bucket{{{OF}, le="+Inf"}}': "0+10x24",
        f"baton_request_prompt_tokens_sum{{{OF}}}": "0+1000x24",
        f"baton_time_to_first_token_seconds_count{{{OF}}}": "0+10x24",
        f"baton_router_queue_prompt_tokens{{{OF}}}": "300+0x24",
        f"baton_router_queue_prompt_tokens{{{OF}, replica='b'}}": "40+0x24",
    }
    expected = {
        '{asked="age"}': 0,
        '{asked="arrivals"}': 180,
        '{asked="begun"}': 2,
        '{asked="burst"}': 45,
        '{asked="prompts", le="16"}': 60,
        '{asked="prompts", le="+Inf"}': 120,
        '{asked="prompts_sum"}': 12000,
        '{asked="queued"}': 340,
        '{asked="ttft_count"}': 120,
    }
    test = {
        "interval": "5s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": build_query("c", 60.0, 15.0, 60.0),
                "eval_time": "2m",
                "exp_samples": [{"labels": k, "value": v} for k, v in expected.items()],
            }
        ],
    }
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", str(file))


def test_a_name_is_quoted() -> None:
    assert '{cluster="a\\"b\\\\"}' in build_query('a"b\\', 60.0, 15.0, 60.0)


# ---- answers ------------------------------------------------------------------------------------


def answer(values: dict[tuple[str, str], Any]) -> dict[str, Any]:
    result = [
        {"metric": {"asked": name} | ({"le": le} if le else {}), "value": [1.5, str(value)]}
        for (name, le), value in values.items()
    ]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


GOOD = {
    ("age", ""): 2.5,
    ("arrivals", ""): 120,
    ("begun", ""): 1,
    ("burst", ""): 35,
    ("answered", ""): 12000,
    ("pairs", ""): 450_000,
    ("ended", ""): 11_000,
    ("output_pairs", ""): 900_000,
    ("queued", ""): 700,
    **{(name, le): n for name in ("prompts", "uncached") for le, n in (("128", 60), ("+Inf", 60))},
    ("prompts_sum", ""): 6000,
    ("uncached_sum", ""): 3000,
    ("ttft_sum", ""): 30,
    ("ttft_count", ""): 60,
}


class Server:
    """Says ``body`` with ``status``, and remembers what it was asked. None: nothing, ever."""

    def __init__(self) -> None:
        self.body: bytes | None = json.dumps(answer(GOOD)).encode()
        self.status = 200
        self.asked: list[tuple[str | None, str]] = []

    async def query(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.asked.append((request.headers.get("Authorization"), str(form.get("query"))))
        if self.body is None:
            await asyncio.sleep(30)
        location = {"Location": "http://127.0.0.1:1/"} if self.status == 302 else None
        return web.Response(body=self.body, status=self.status, headers=location)


@asynccontextmanager
async def served(user: str = "") -> AsyncIterator[tuple[Server, PrometheusApi]]:
    server, app = Server(), web.Application()
    app.router.add_post("/prefix/api/v1/query", server.query)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    url = check_prometheus_url(f"http://{user}127.0.0.1:{port}/prefix")
    try:
        async with PrometheusApi(url, "c", interval_s=5.0, window_s=60.0) as api:
            yield server, api
    finally:
        await runner.cleanup()


async def test_an_answer() -> None:
    async with served("me:s%40cret@") as (server, api):
        look = await api.read_traffic([])
        age_s = asyncio.get_running_loop().time() - look.at_s
    assert age_s == pytest.approx(2.5, abs=0.5)
    assert (look.mix.rate, look.mix.window_s) == (2.0, 60.0)
    assert look.mix.backlog_tokens == 700
    assert look.observed.ttft_s == 0.5
    assert look.observed.tpot_s is None
    assert sum(s.weight * s.uncached for s in look.mix.samples) == pytest.approx(25)
    assert sum(s.weight * s.cached for s in look.mix.samples) == pytest.approx(75)
    assert server.asked == [("Basic bWU6c0BjcmV0", build_query("c", 60.0, 15.0, 60.0))]


async def test_nobody_asks_and_what_they_asked_is_known_still() -> None:
    async with served() as (server, api):
        before = await api.read_traffic([])
        idle = {("arrivals", ""): 0, ("begun", ""): 1, ("age", ""): 1}
        server.body = json.dumps(answer(idle)).encode()
        look = await api.read_traffic([])
    assert look.mix.rate == 0.0
    assert look.mix.samples == before.mix.samples


async def test_a_change_is_followed_by_the_short_window() -> None:
    async with served() as (server, api):
        server.body = json.dumps(answer(GOOD | {("burst", ""): 75})).encode()
        look = await api.read_traffic([])
    assert (look.mix.rate, look.mix.window_s) == (5.0, 15.0)


def steady(requests: int) -> dict[tuple[str, str], Any]:
    """Return an answer about so many requests of like lengths in a minute."""
    return {
        **GOOD,
        ("arrivals", ""): requests,
        ("burst", ""): requests / 4,
        ("prompts_sum", ""): 100 * requests,
        ("outputs_sum", ""): 100 * requests,
        **{("outputs", le): requests for le in ("128", "+Inf")},
    }


@pytest.mark.parametrize(
    ("requests", "alike_s", "asked_s"),
    [
        (60_000, 1000.0, 60.0),
        (60, 1000.0, 300.0),  # lengths vary too much to know the load by 60 requests a minute
        (60, 40.0, 100.0),  # but before the first window nothing is known
    ],
)
async def test_the_window_follows_the_variance(
    monkeypatch: pytest.MonkeyPatch, requests: int, alike_s: float, asked_s: float
) -> None:
    now = [5000.0]
    monkeypatch.setattr(prometheus_api, "time", SimpleNamespace(monotonic=lambda: now[0]))
    async with served() as (server, api):
        server.body = json.dumps(answer(steady(requests))).encode()
        for _ in range(2):
            await api.read_traffic([])
            now[0] += alike_s
        await api.read_traffic([])
        server.body = json.dumps(answer(steady(requests) | {("burst", ""): 4 * requests})).encode()
        await api.read_traffic([])  # the load has risen
        await api.read_traffic([])
    asked = [query for _, query in server.asked]
    assert asked[1] == build_query("c", 60.0, 15.0, 60.0)
    assert asked[2] == build_query("c", asked_s, 15.0, 60.0)
    assert asked[4] == build_query("c", 60.0, 15.0, 60.0)  # nothing before the change


async def test_what_was_before_a_change_is_at_the_level_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [5000.0]
    monkeypatch.setattr(prometheus_api, "time", SimpleNamespace(monotonic=lambda: now[0]))
    async with served() as (server, api):
        for turn in range(30):
            burst = 1500 if turn < 27 else 4500
            server.body = json.dumps(answer(steady(6000) | {("burst", ""): burst})).encode()
            look = await api.read_traffic([])
            now[0] += 5.0
    assert look.mix.arrivals.counts == pytest.approx((4500,) * 10)


async def test_nothing_is_known_before_the_first_window_is_full() -> None:
    async with served() as (server, api):
        young = {key: value for key, value in GOOD.items() if key[0] != "begun"}
        server.body = json.dumps(answer(young)).encode()
        with pytest.raises(Unavailable, match="the first window is not full"):
            await api.read_traffic([])


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"no JSON", 200, "no answer"),
        (b'{"status": "success", "data": {"result": [1]}}', 200, "no answer"),
        (b"\xff\xfe", 200, "no answer"),
        (b'{"status": "error"}', 200, "could not evaluate"),
        (b'{"status": "success"}', 200, "has no baton_requests_received_total of cluster c"),
        (b"", 401, "answers 401"),
        (b"", 302, "answers 302"),
        (b" " * (prometheus_api.MAX_ANSWER_BYTES + 1), 200, "more than 1024 KiB"),
    ],
)
async def test_no_answer(body: bytes, status: int, why: str) -> None:
    async with served() as (server, api):
        server.body, server.status = body, status
        with pytest.raises(Unavailable, match=why):
            await api.read_traffic([])


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e30", "many"])
async def test_figures_that_cannot_be(value: str) -> None:
    async with served() as (server, api):
        server.body = json.dumps(answer(GOOD | {("arrivals", ""): value})).encode()
        with pytest.raises(Unavailable):
            await api.read_traffic([])
        server.body = json.dumps(answer(GOOD | {("prompts", value): 1})).encode()
        assert (await api.read_traffic([])).mix.rate == 2.0


async def test_a_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_api, "DEADLINE_S", 0.1)
    async with served() as (server, api):
        server.body = None
        with pytest.raises(Unavailable, match=r"within 0\.1 s"):
            await api.read_traffic([])


async def test_nobody_listens() -> None:
    url = URL("http://127.0.0.1:1")
    async with PrometheusApi(url, "c", interval_s=5.0, window_s=60.0) as api:
        with pytest.raises(Unavailable, match="Connection refused"):
            await api.read_traffic([])


@pytest.mark.parametrize(
    "url",
    ["", "localhost:9090", "ftp://h", "http://", "http://h/?q=1", "http://[::1", "http://h:x"],
)
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(StartupError, match="prometheus_url must be"):
        check_prometheus_url(url)


def test_a_password_goes_beyond_this_machine_with_tls_only() -> None:
    with pytest.raises(StartupError, match="https only") as told:
        check_prometheus_url("http://me:hidden@prometheus.example")
    assert "hidden" not in str(told.value)
    assert check_prometheus_url("https://me:hidden@prometheus.example").password == "hidden"
    assert check_prometheus_url("http://prometheus.example/prefix").path == "/prefix"
