"""A page that stays open while its router becomes a newer one, in a real browser."""

from __future__ import annotations

import re
from typing import Any

from playwright.async_api import expect

from tests.router.conftest import Start, served
from tests.router.fake_worker import outputs
from tests.system import needs
from tests.workers.browser import chromium, tab

LIVE = re.compile("live")


async def test_a_page_that_is_older_than_its_router(start: Start) -> None:
    needs("chromium")
    cluster = await start(outputs())
    async with (
        served(cluster.app) as url,
        chromium() as browser,
        tab(browser, url) as seen,
    ):
        page = seen.page
        await expect(page.locator("#age")).to_have_class(LIVE)

        async def newer(route: Any) -> None:
            reply = await route.fetch()
            told = await reply.json()
            told["router"]["latency"] = {"ttft": told["router"].pop("ttft")}
            await route.fulfill(response=reply, json=told)

        await page.route("**/ui/overview", newer)
        notice = page.locator("#notice")
        await expect(notice).to_contain_text("of another version than the router")
        await expect(notice).to_contain_text("figures below are out of date")
        await expect(page).to_have_title("Reload · Baton")
        await expect(page.locator("#age")).not_to_have_class(LIVE)
        await seen.accessible()
        await page.unroute_all(behavior="wait")
        async with page.expect_navigation():
            await notice.get_by_role("button", name="Reload").click()
        await expect(page.locator("#age")).to_have_class(LIVE)
        await expect(notice).to_be_empty()
        seen.check("TypeError")
