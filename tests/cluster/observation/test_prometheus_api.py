"""Requests counted by a Prometheus: the query, by its own judge; answers, of a server that lies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from yarl import URL

from cluster.observation import prometheus_api
from cluster.observation.prometheus_api import PrometheusApi, check_prometheus_url
from cluster.observation.prometheus_query import build_query
from protocol.errors import StartupError, Unavailable
from tests.cluster.observation.emulated_prometheus import EmulatedPrometheus
from tests.cluster.promtool import promtool
from tests.system import needs

OF = 'cluster="c", role="router"'


def query_of(window_s: float, gap_s: float = 30.0) -> str:
    return build_query("c", window_s, 15.0, first_s=60.0, gap_s=gap_s, stale_s=30.0)


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
        '{asked="burst"}': 45,
        '{asked="prompts", le="16"}': 60,
        '{asked="prompts", le="+Inf"}': 120,
        '{asked="prompts_sum"}': 12000,
        '{asked="queued"}': 340,
        '{asked="scrapes"}': 7,
        '{asked="ttft_count"}': 120,
    }
    test = {
        "interval": "5s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": query_of(60.0),
                "eval_time": "2m",
                "exp_samples": [{"labels": k, "value": v} for k, v in expected.items()],
            }
        ],
    }
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", str(file))


@pytest.mark.parametrize("last", ["_", "stale"])
def test_prometheus_finds_gaps(tmp_path: Path, last: str) -> None:
    needs("promtool")
    series = {  # one router until 120 s, the next one from 100 to 150 s, a third one from 500 s
        f"baton_requests_received_total{{{OF}, replica='a'}}": f"0+10x24 {last}",
        f"baton_requests_received_total{{{OF}, replica='b'}}": f"_x20 0+10x10 {last}",
        f"baton_requests_received_total{{{OF}, replica='c'}}": "_x100 0+10x40",
        "baton_requests_received_total{cluster='other'}": "0+99x160",
    }
    named = '{asked="gap"}', '{asked="scrapes"}'
    parts = query_of(60.0, gap_s=15.0).split(" or ")
    tests = [
        {
            "expr": " or ".join(p for p in parts if '"gap"' in p or '"scrapes"' in p),
            "eval_time": f"{at_s}s",
            "exp_samples": [
                {"labels": name, "value": value}
                for name, value in zip(named, (gap, scrapes), strict=True)
                if value is not None
            ],
        }
        for at_s, gap, scrapes in [
            (50, 1, 7),  # the first minute is not over
            (65, None, 7),
            (160, None, 7),
            (175, 1, 7),
            (400, 1, None),
            (550, 1, 7),
            (565, None, 7),
        ]
    ]
    file = tmp_path / "case.yml"
    given = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "5s", "input_series": given, "promql_expr_test": tests}
    file.write_text(yaml.safe_dump({"tests": [case], "evaluation_interval": "5s"}))
    promtool("test", "rules", str(file))


def test_a_name_is_quoted() -> None:
    query = build_query('a"b\\', 60.0, 15.0, first_s=60.0, gap_s=15.0, stale_s=30.0)
    assert '{cluster="a\\"b\\\\"}' in query


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
    ("burst", ""): 35,
    ("scrapes", ""): 3,
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
    """Says ``body`` (or what it returns for the query) with ``status``, and remembers what it was
    asked. None: nothing, ever."""

    def __init__(self) -> None:
        self.body: bytes | Callable[[str], dict[tuple[str, str], Any]] | None = json.dumps(
            answer(GOOD)
        ).encode()
        self.status = 200
        self.asked: list[tuple[str | None, str]] = []

    async def query(self, request: web.Request) -> web.Response:
        form = await request.post()
        asked = str(form.get("query"))
        self.asked.append((request.headers.get("Authorization"), asked))
        body = self.body
        if body is None:
            await asyncio.sleep(30)
        elif not isinstance(body, bytes):
            body = json.dumps(answer(body(asked))).encode()
        location = {"Location": "http://127.0.0.1:1/"} if self.status == 302 else None
        return web.Response(body=body, status=self.status, headers=location)


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
    assert server.asked == [("Basic bWU6c0BjcmV0", query_of(60.0))]


async def test_nobody_asks_and_what_they_asked_is_known_still() -> None:
    async with served() as (server, api):
        before = await api.read_traffic([])
        idle = {("arrivals", ""): 0, ("age", ""): 1}
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


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the source sees."""
    now = [5000.0]
    monkeypatch.setattr(prometheus_api, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    ("requests", "turns", "asked_s"),
    [
        (60_000, 200, 60.0),
        (60, 200, 300.0),  # lengths vary too much to know the load by 60 requests a minute
        (60, 8, 100.0),  # but before the first window nothing is known
    ],
)
async def test_the_window_follows_the_variance(
    now: list[float], requests: int, turns: int, asked_s: float
) -> None:
    async with served() as (server, api):
        server.body = json.dumps(answer(steady(requests))).encode()
        for _ in range(turns):
            await api.read_traffic([])
            now[0] += 5.0
        await api.read_traffic([])
        server.body = json.dumps(answer(steady(requests) | {("burst", ""): 4 * requests})).encode()
        await api.read_traffic([])  # the load has risen
        now[0] += 5.0
        await api.read_traffic([])
    asked = [query for _, query in server.asked]
    assert asked[0] == query_of(60.0)
    assert asked[-3] == asked[-2] == query_of(asked_s)
    assert asked[-1] == query_of(20.0)  # nothing before the change


async def test_few_lengths_after_a_change_do_not_replace_those_before(now: list[float]) -> None:
    async with served() as (server, api):
        server.body = json.dumps(answer(steady(6000) | {("burst", ""): 150})).encode()
        before = await api.read_traffic([])  # the load has fallen
        now[0] += 5.0
        few = steady(99) | {("burst", ""): 75, ("prompts_sum", ""): 99 * 20}
        server.body = json.dumps(answer(few)).encode()
        look = await api.read_traffic([])
    assert before.mix.window_s == 15.0
    assert look.mix.window_s == 20.0
    assert look.mix.samples == before.mix.samples


async def test_what_was_before_a_change_is_at_the_level_after_it(now: list[float]) -> None:
    async with served() as (server, api):
        for turn in range(30):
            burst = 1500 if turn < 27 else 4500
            server.body = json.dumps(answer(steady(6000) | {("burst", ""): burst})).encode()
            look = await api.read_traffic([])
            now[0] += 5.0
    assert look.mix.arrivals.counts == pytest.approx((4500,) * 10)


async def test_nothing_is_known_before_the_first_window_is_full() -> None:
    async with served() as (server, api):
        server.body = json.dumps(answer(GOOD | {("gap", ""): 1})).encode()
        with pytest.raises(Unavailable, match="the first window after that is not full"):
            await api.read_traffic([])


async def test_nothing_is_known_while_prometheus_reaches_no_router() -> None:
    async with served() as (server, api):
        server.body = json.dumps(answer({k: v for k, v in GOOD.items() if k[0] != "age"})).encode()
        with pytest.raises(Unavailable, match="reached no router"):
            await api.read_traffic([])


# ---- gaps and changes, of a server that counts as Prometheus does -------------------------------


async def read_all(
    api: PrometheusApi, now: list[float], until_s: float
) -> dict[float, tuple[float, float] | None]:
    """Read every 5 s. Return rates and windows by time; None where nothing is known."""
    found: dict[float, tuple[float, float] | None] = {}
    while now[0] < until_s:
        try:
            mix = (await api.read_traffic([])).mix
            found[now[0]] = mix.rate, mix.window_s
        except Unavailable:
            found[now[0]] = None
        now[0] += 5.0
    return found


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("gap_s", [45.0, 200.0, 400.0])
async def test_a_time_without_scrapes_does_not_count_as_one_without_requests(
    now: list[float], gap_s: float, answers: bool
) -> None:
    end_s = 1000.0 + gap_s
    emulated = EmulatedPrometheus(now, [(0.0, 0.5)], without=(1000.0, end_s))
    now[0] = 400.0
    async with served() as (server, api):
        server.body = emulated.answer
        found = await read_all(api, now, 1000.0)
        if not answers:
            now[0] = end_s
        found |= await read_all(api, now, end_s + 400.0)
    rates = [one[0] for one in found.values() if one is not None]
    assert rates == pytest.approx([0.5] * len(rates), rel=0.1)
    assert found[995.0] == pytest.approx((0.5, 300.0), rel=0.05)
    assert all(found[t] is None for t in found if 1020.0 <= t < end_s + 55.0)
    first = next(one for t, one in found.items() if t >= end_s and one is not None)
    assert first[1] == 60.0
    assert all(one is not None for t, one in found.items() if t >= end_s + 70.0)
    assert found[end_s + 395.0] == pytest.approx((0.5, 300.0), rel=0.05)


@pytest.mark.parametrize(
    ("scrape_s", "gap_s", "is_gap"),
    [(5.0, 10.0, False), (5.0, 25.0, True), (10.0, 15.0, False), (10.0, 45.0, True)],
)
async def test_a_gap_is_longer_than_usual_scrapes(
    now: list[float], scrape_s: float, gap_s: float, is_gap: bool
) -> None:
    without = (1000.0, 1000.0 + gap_s)
    emulated = EmulatedPrometheus(now, [(0.0, 0.5)], without=without, scrape_s=scrape_s)
    now[0] = 400.0
    async with served() as (server, api):
        server.body = emulated.answer
        found = await read_all(api, now, 1200.0)
    unknown = [t for t, one in found.items() if one is None and t > 1000.0 + gap_s + scrape_s]
    assert bool(unknown) == is_gap


async def test_prometheus_alone_knows_what_came_while_it_did_not_answer(now: list[float]) -> None:
    emulated = EmulatedPrometheus(now, [(0.0, 0.5), (1100.0, 1.0)])
    now[0] = 400.0
    async with served() as (server, api):
        server.body = emulated.answer
        await read_all(api, now, 1000.0)
        now[0] = 1160.0
        found = await read_all(api, now, 1400.0)
    assert found[1160.0] == pytest.approx((1.0, 60.0), rel=0.05)
    assert found[1165.0] == pytest.approx((1.0, 65.0), rel=0.05)
    assert found[1395.0] == pytest.approx((1.0, 295.0), rel=0.05)


@pytest.mark.parametrize("scrape_s", [5.0, 10.0])
@pytest.mark.parametrize(("before", "after"), [(10.0, 20.0), (5.0, 2.0)])
async def test_the_load_before_a_change_does_not_come_back(
    now: list[float], before: float, after: float, scrape_s: float
) -> None:
    loads = [(0.0, before), (1000.0, after)]
    emulated = EmulatedPrometheus(now, loads, scrape_s=scrape_s)
    now[0] = 400.0
    async with served() as (server, api):
        server.body = emulated.answer
        found = await read_all(api, now, 1120.0)
    rates = [one[0] for t, one in found.items() if t >= 1020.0 and one is not None]
    assert len(rates) == 20
    assert rates == pytest.approx([after] * 20, rel=0.15)


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
