"""The live page in a real browser, over a real cluster under load."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from cluster.local.ports import free_ports
from cluster.local.redis_server import EmbeddedRedis
from tests.router.conftest import served
from tests.system import needs
from tests.workers import watched
from tests.workers.browser import PHONE, chromium, tab
from tests.workers.watched import Served

pytestmark = pytest.mark.system
LIVE = re.compile("live")
KEY = "sk-right"
REFUSED = "ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET"


@pytest_asyncio.fixture(scope="module")
async def redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedRedis]:
    async with watched.workers(tmp_path_factory.mktemp("page")) as redis:
        yield redis


@pytest_asyncio.fixture(scope="module")
async def router(redis: EmbeddedRedis) -> AsyncIterator[Served]:
    """Under load, with objectives that a slow machine meets."""
    goals = {"ttft_slo_s": 20.0, "tpot_slo_s": 2.0}
    async with watched.router(redis, 2, **goals) as router, watched.load(router.url, 4.0):
        yield router


@pytest_asyncio.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    needs("chromium")
    async with chromium() as browser:
        yield browser


async def live(page: Page) -> None:
    """Until it shows figures of a window."""
    await expect(page.locator("#window")).to_contain_text("of the last")
    await expect(page.locator("#age")).to_have_class(LIVE)


def cell(page: Page, table: str, row: str, column: int) -> Any:
    return page.locator(f"{table} tbody tr", has_text=row).locator("td").nth(column)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_shows_what_the_cluster_does(
    browser: Browser, router: Served, scheme: str
) -> None:
    async with tab(browser, router.url, color_scheme=scheme) as seen:
        page = seen.page
        await live(page)
        await expect(page.locator("#verdict")).to_have_text("Healthy")
        await expect(page).to_have_title("Healthy · baton-demo · Baton")
        await expect(page.locator("#tiles div", has_text="in time")).to_contain_text("100%")
        await expect(cell(page, "#requests", "ok", 0)).to_have_text(re.compile(r"^[1-9]"))
        for row in ("TTFT", "TPOT", "ITL"):
            await expect(cell(page, "#latency", row, 0)).to_have_text(re.compile(r"\d.*s$"))
        await expect(page.locator("#stages li")).to_have_text(
            [re.compile(n) for n in ("routing", "queue", "prefill", "first emit")]
        )
        for role in ("Prefill", "Decode"):
            pool = page.get_by_role("table", name=role)
            await expect(pool.get_by_role("row")).to_have_count(2)
            await expect(pool.get_by_role("cell", name="ready")).to_be_visible()
            await expect(pool.get_by_role("row").nth(1)).to_contain_text("/s")
        chart = page.get_by_role("img", name=re.compile("^Tokens, last five minutes"))
        await expect(chart).to_have_accessible_name(re.compile(r"decode: now [\d.]+/s, from"))
        await expect(chart.locator("path.line1")).to_have_attribute("d", re.compile("^M.*L"))
        await seen.accessible()
        await seen.fits()
        seen.check()


async def test_prompt_takes_its_steps_through_the_workers(browser: Browser, router: Served) -> None:
    async with tab(browser, router.url) as seen:
        page = seen.page
        await live(page)
        await expect(page.locator("#kind-note")).to_contain_text("continues the beginning")
        await page.get_by_label("Prompt", exact=True).fill("def read_lines(path):")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("#progress")).to_have_text(re.compile("^The (answer|model) has"))
        for step in ("routing", "queue", "prefill", "delivery"):
            await expect(page.locator("#timeline .steps li", has_text=step)).to_contain_text("s")
        prefill = page.locator("#timeline .steps li", has_text=re.compile("^prefill"))
        await expect(prefill).to_contain_text("on 127.0.0.1")
        await page.get_by_text("Why these workers").click()
        await expect(page.locator("#placement")).to_contain_text("The first token was predicted")
        await seen.accessible()
        await seen.fits()
        seen.check()


NUMBERS: dict[str, dict[float | None, str]] = {
    "seconds": {None: "\u2013", 1.23e-5: "12 µs", 0.00456: "4.56 ms", 0.25: "250 ms", 61: "61 s"},
    "percent": {0: "0%", 1e-4: "0.1%", 0.056: "5.6%", 0.5: "50%", 0.99999: "99.9%", 1: "100%"},
    "perSecond": {0: "0/s", 0.04: "0.04/s", 343.2: "343/s", 12345: "12.3 k/s", 2e6: "2 M/s"},
    "count": {0: "0", 9999: "9999", 10000: "10 k", 123456: "123 k"},
    "bytesPerSecond": {0: "0 MB/s", 123456: "0.12 MB/s", 2.5e9: "2.5 GB/s"},
}


async def test_numbers_are_for_people(browser: Browser, router: Served) -> None:
    read = "async ([form, values]) => { const f = await import('/ui/format.js');"
    read += " return values.map((v) => f.text(f[form](v))); }"
    async with tab(browser, router.url) as seen:
        for form, shown in NUMBERS.items():
            told = await seen.page.evaluate(read, [form, list(shown)])
            assert [each.replace("\u202f", " ") for each in told] == list(shown.values())


async def test_figures_are_those_of_the_router(browser: Browser, router: Served) -> None:
    async with tab(browser, router.url) as seen:
        page = seen.page
        await live(page)
        async with page.expect_response("**/ui/overview") as answered:
            pass
        told = await (await answered.value).json()
        assert told["router"]["objectives"] == {"ttft": 20.0, "tpot": 2.0}
        await expect(page.locator("#latency tbody tr").nth(1).locator("th")).to_contain_text(
            "≤ 2\u202fs"
        )
        ended = told["router"]["requests"]["ok"]
        await expect(cell(page, "#requests", "ok", 0)).to_have_text(str(ended))
        [worker] = [w for w in told["workers"] if w["role"] == "decode"]
        row = page.get_by_role("table", name="Decode").get_by_role("row").nth(1)
        await expect(row.get_by_role("rowheader")).to_have_text(worker["instance"][:6])
        assert worker["host"] == "127.0.0.1"
        await expect(row.get_by_role("cell").first).to_have_text("127.0.0.1")


async def test_a_phone(browser: Browser, router: Served) -> None:
    options = {"viewport": PHONE, "has_touch": True, "reduced_motion": "reduce"}
    async with tab(browser, router.url, **options) as seen:
        await live(seen.page)
        await seen.fits()
        row = seen.page.get_by_role("table", name="Decode").get_by_role("row")
        await expect(row).to_contain_text("ready")  # columns are named in each row
        await seen.accessible()
        seen.check()
        moving = await seen.page.evaluate(
            "[...document.querySelectorAll('*')].filter((e) =>"
            " getComputedStyle(e).transitionDuration !== '0s').length"
        )
        assert moving == 0, "where motion is unwelcome"


async def test_every_width(browser: Browser, router: Served) -> None:
    async with tab(browser, router.url) as seen:
        await live(seen.page)
        for width in (320, 375, 760, 761, 1100, 1101, 1240, 1241, 1366, 1920):
            await seen.page.set_viewport_size({"width": width, "height": 800})
            await seen.fits()


async def focused(page: Page) -> str:
    """What has the focus, which must be seen."""
    found = await page.evaluate(
        "(() => { const e = document.activeElement, s = getComputedStyle(e);"
        " return [e.id || e.textContent, s.outlineStyle, parseFloat(s.outlineWidth)]; })()"
    )
    assert found[1] == "solid" and found[2] >= 2, found
    return str(found[0])


async def test_a_keyboard_alone(browser: Browser, router: Served) -> None:
    async with tab(browser, router.url) as seen:
        page = seen.page
        await live(page)
        await page.keyboard.press("Tab")
        assert await focused(page) == "To the workers"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "pools"
        for control in ("go", "temperature", "limit", "kind", "prompt", "pause"):
            await page.keyboard.press("Shift+Tab")
            assert await focused(page) == control
        await page.keyboard.press("Space")
        await expect(page.locator("#age")).to_contain_text("paused")
        await expect(page.locator("#pause")).to_have_text("Resume")
        asked = len(seen.asked)
        await asyncio.sleep(2.5)
        assert len(seen.asked) == asked, "paused: nothing is asked"
        assert await focused(page) == "pause"
        await page.keyboard.press("Enter")
        await expect(page.locator("#age")).to_have_class(LIVE)
        seen.check()


async def test_a_tab_that_nobody_sees_asks_nothing(browser: Browser, router: Served) -> None:
    async with tab(browser, router.url) as seen:
        page = seen.page
        await live(page)
        hide = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden,"
        hide += " configurable: true }); document.dispatchEvent(new Event('visibilitychange')); }"
        await page.evaluate(hide, True)
        asked, looks = len(seen.asked), router.looks
        await asyncio.sleep(2.5)
        assert (len(seen.asked), router.looks) == (asked, looks)
        async with page.expect_response("**/ui/overview"):
            await page.evaluate(hide, False)
        await expect(page.locator("#age")).to_have_class(LIVE)
        seen.check()


async def test_many_tabs_are_one_look_a_second(browser: Browser, router: Served) -> None:
    async with tab(browser, router.url), tab(browser, router.url) as seen:
        await live(seen.page)
        looks, began = router.looks, asyncio.get_running_loop().time()
        await asyncio.sleep(3.0)
        took = asyncio.get_running_loop().time() - began
        assert 1 <= router.looks - looks <= took + 1


async def test_what_a_server_says_is_text(browser: Browser, router: Served) -> None:
    evil = "<img src=x onerror=alert(1)>"
    async with tab(browser, router.url) as seen:
        page = seen.page

        async def poisoned(route: Any) -> None:
            reply = await route.fetch()
            told = await reply.json()
            told["model"] = told["cluster"] = evil
            told["verdict"] = {"level": "strained", "reasons": [evil]}
            told["router"]["requests"] = {evil: 1}
            told["workers"][0] |= {"instance": evil, "why": evil, "state": "silent"}
            await route.fulfill(response=reply, json=told)

        await page.route("**/ui/overview", poisoned)
        await expect(page.locator("#model")).to_have_text(evil)
        await expect(page.locator("#verdict")).to_have_text("Strained")
        await expect(page.locator("#reasons")).to_have_text(evil)
        await expect(page.locator(".why").first).to_contain_text(evil)
        assert await page.locator("main img").count() == 0
        await seen.accessible()
        await seen.fits()
        await page.unroute_all(behavior="wait")
        seen.check()


async def test_a_key_is_asked_for(browser: Browser, redis: EmbeddedRedis, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}: {{tenant: acme, scopes: [monitor]}}")
    keys.chmod(0o600)
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(watched.router(redis, 2, api_keys=str(keys)))
        seen = await stack.enter_async_context(tab(browser, router.url))
        page = seen.page
        key = page.get_by_label("API key")
        await expect(key).to_be_focused()
        await seen.accessible()
        await page.keyboard.type("sk-wrong")
        await page.keyboard.press("Enter")
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("does not know this key")
        await expect(key).to_be_focused()
        await page.keyboard.type("schlüssel")
        await page.keyboard.press("Enter")
        await expect(alert).to_contain_text("ASCII")
        await expect(page.locator("#main")).to_be_hidden()
        await key.fill(KEY)
        await page.keyboard.press("Enter")
        await live(page)
        assert all(KEY not in url for url in seen.asked)
        stores = "document.cookie + JSON.stringify([localStorage, sessionStorage])"
        assert await page.evaluate(stores) == "[{},{}]"
        await page.get_by_role("button", name="Forget the key").click()
        await expect(key).to_be_focused()
        await expect(page.locator("#main")).to_be_hidden()
        await key.fill(KEY)
        await page.keyboard.press("Enter")
        await live(page)
        await page.reload()
        await expect(key).to_be_focused()
        seen.check("401")


async def test_a_router_that_dies_and_comes_back(
    browser: Browser, redis: EmbeddedRedis, router: Served
) -> None:
    [port] = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        async with served(router.app, port):
            seen = await stack.enter_async_context(tab(browser, url))
            await live(seen.page)
        notice = seen.page.get_by_role("status").filter(has_text="does not answer")
        await expect(notice).to_contain_text("figures below are out of date")
        await expect(seen.page.locator("#verdict")).to_have_text("Unknown")
        await expect(seen.page.locator("#reasons")).to_contain_text("does not answer")
        await expect(seen.page.locator("#age")).to_have_text(re.compile(r"^\d+ s old$"))
        await expect(seen.page).to_have_title("No answer · Baton")
        await seen.accessible()
        async with served(router.app, port):
            await live(seen.page)
            await expect(notice).to_have_count(0)
            await expect(seen.page.locator("#verdict")).to_have_text("Healthy")
            await expect(seen.page).to_have_title("Healthy · baton-demo · Baton")
        seen.check(REFUSED)
