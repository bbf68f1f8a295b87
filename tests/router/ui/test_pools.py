"""Pools with many workers on the live page: folded, sorted, summed up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.router.conftest import Start, served
from tests.router.fake_worker import outputs
from tests.workers.browser import PHONE, Watched, tab

pytestmark = pytest.mark.system


def worker(i: int, role: str) -> dict[str, Any]:
    return {
        "instance": f"{i:06x}{role}",
        "role": role,
        "home": role,
        "target": f"10.0.0.{i // 4}:9000",
        "host": f"10.0.0.{i // 4}",
        "state": {9: "silent", 11: "draining"}.get(i, "ready"),
        "why": "does not answer within 1.5 s" if i == 9 else "",
        "running": (i * 7) % 32,
        "waiting": 1,
        "queued_prefill_tokens": 10 * i,
        "kv_usage": i / 32,
        "kv_tokens": 100_000,
        "hit_ratio": None if i % 2 else 0.5,
        "tokens_per_s": 10.0,
        "received_bytes_per_s": 1e9,
        "step_s": 0.01,
        "engine_restarts": 0,
        "speculation": None,
        "links": [],
    }


@contextlib.asynccontextmanager
async def crowded(
    browser: Browser, start: Start, count: int = 32, **options: Any
) -> AsyncIterator[Watched]:
    """The page of a router that claims ``count`` workers in each pool."""
    workers = [worker(i, role) for role in ("prefill", "decode") for i in range(count)]
    cluster = await start(outputs())

    async def claim(route: Any) -> None:
        reply = await route.fetch()
        await route.fulfill(response=reply, json={**await reply.json(), "workers": workers})

    async with served(cluster.app) as url, tab(browser, url, **options) as seen:
        await seen.page.route("**/ui/overview", claim)
        await expect(table(seen.page)).to_be_visible()
        yield seen
        await seen.page.unroute_all(behavior="wait")


def table(page: Page) -> Any:
    return page.get_by_role("table", name="Decode")


def names(page: Page) -> Any:
    return table(page).locator("tbody:not(.all)").get_by_role("rowheader")


def numbered(*workers: int) -> list[str]:
    return [f"{i:06x}" for i in workers]


async def test_many_workers_are_folded_and_those_in_trouble_are_first(
    browser: Browser, start: Start
) -> None:
    async with crowded(browser, start) as seen:
        page = seen.page
        await expect(names(page)).to_have_text(numbered(9, 11, 0, 1, 2, 3, 4, 5))
        pool = page.locator(".pool", has=page.get_by_role("heading", name="Decode"))
        await expect(pool).to_contain_text("30 of 32 ready")
        await expect(pool).to_contain_text("000009 on 10.0.0.2: does not answer within 1.5 s")
        await pool.get_by_role("button", name="Show all 32 workers").click()
        await expect(names(page)).to_have_count(32)
        await pool.get_by_role("button", name="Show 8 workers").click()
        await expect(names(page)).to_have_count(8)
        await seen.accessible()
        await seen.fits()
        seen.check()


async def test_pool_is_summed_up(browser: Browser, start: Start) -> None:
    async with crowded(browser, start) as seen:
        cells = table(seen.page).locator(".all").get_by_role("row").locator("th, td")
        kv = sum(i / 32 for i in range(32) if i != 9) / 31
        told = [text.replace("\u202f", " ") for text in await cells.all_inner_texts()]
        running = sum((i * 7) % 32 for i in range(32) if i != 9)
        assert told[:5] == ["all 32", "8 hosts", "", str(running), "31"]
        assert told[6] == f"{kv:.0%}" and told[7] == "310/s" and told[9] == "31 GB/s"


async def test_columns_sort(browser: Browser, start: Start) -> None:
    async with crowded(browser, start) as seen:
        page = seen.page

        async def by(column: str, order: str, *workers: int) -> None:
            await table(page).get_by_role("button", name=re.compile(f"^{column}")).click()
            await expect(names(page)).to_have_text(numbered(*workers))
            head = table(page).get_by_role("columnheader", name=column)
            await expect(head).to_have_attribute("aria-sort", order)
            await expect(table(page).locator("[aria-sort]")).to_have_count(1)

        await by("KV in use", "descending", 31, 30, 29, 28, 27, 26, 25, 24)
        await by("KV in use", "ascending", 0, 1, 2, 3, 4, 5, 6, 7)
        await by("hits", "descending", 0, 2, 4, 6, 8, 10, 12, 14)
        await by("host", "ascending", 0, 1, 2, 3, 4, 5, 6, 7)
        await by("host", "descending", 28, 29, 30, 31, 24, 25, 26, 27)
        async with page.expect_response("**/ui/overview"):
            pass  # the order stays when new figures come
        await expect(names(page)).to_have_text(numbered(28, 29, 30, 31, 24, 25, 26, 27))


async def test_few_workers_are_not_folded(browser: Browser, start: Start) -> None:
    async with crowded(browser, start, 3) as seen:
        await expect(names(seen.page)).to_have_text(numbered(0, 1, 2))
        await expect(table(seen.page).locator("td.host").last).to_have_text("10.0.0.0")
        await expect(seen.page.get_by_role("button", name="Show all")).to_have_count(0)


async def test_all_reasons_are_shown_while_no_worker_is_there(
    browser: Browser, start: Start
) -> None:
    reasons = ["no decode worker is ready", "1 router cannot be reached for metrics"]
    changes = {"workers": [], "verdict": {"level": "down", "reasons": reasons}}
    cluster = await start(outputs())

    async def claim(route: Any) -> None:
        reply = await route.fetch()
        await route.fulfill(response=reply, json=await reply.json() | changes)

    async with served(cluster.app) as url, tab(browser, url) as seen:
        page = seen.page
        await page.route("**/ui/overview", claim)
        await expect(page.locator("#verdict")).to_have_text("Down")
        for _ in range(2):  # also when the figures are updated
            await page.wait_for_event("requestfinished", lambda asked: "overview" in asked.url)
        await expect(page.locator("#reasons li")).to_have_text(reasons)
        text = "getComputedStyle(document.getElementById('tables'), '::before').content"
        assert await page.evaluate(text) == '"No worker is registered."'
        await page.unroute_all(behavior="wait")


async def test_phone_shows_model_and_button_in_one_line(browser: Browser, start: Start) -> None:
    async with crowded(browser, start, 3, viewport=PHONE) as seen:
        title = await seen.page.get_by_role("heading", level=1).bounding_box()
        button = await seen.page.get_by_role("button", name="Pause").bounding_box()
        assert title is not None and button is not None
        assert button["y"] < title["y"] + title["height"]


async def test_phone_sorts_too(browser: Browser, start: Start) -> None:
    async with crowded(browser, start, viewport=PHONE, has_touch=True) as seen:
        await table(seen.page).get_by_role("button", name=re.compile("^KV in use")).click()
        await expect(names(seen.page).first).to_have_text("00001f")
        await seen.fits()
        await seen.accessible()
        seen.check()


async def test_every_width(browser: Browser, start: Start) -> None:
    async with crowded(browser, start) as seen:
        for width in (320, 390, 760, 761, 1100, 1280, 1440, 1700, 1799, 1800, 2560):
            await seen.page.set_viewport_size({"width": width, "height": 800})
            await seen.fits()
