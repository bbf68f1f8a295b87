"""Headless Chromium, of the machine's own, and a page in it that is held to good manners."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.system import program

expect.set_options(timeout=10_000)

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-lcd-text",  # smaller pictures, the same everywhere
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program("chromium"), args=list(_FLAGS)
        )
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """A tab, and what it did that it should not have."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._host = urlsplit(url).netloc
        page.on("console", lambda said: self._said(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def check(self, *expected: str) -> None:
        """No complaint but those that match, and nothing was asked of anybody else."""
        rest = [c for c in self.complaints if not any(re.search(e, c) for e in expected)]
        assert not rest
        assert {urlsplit(url).netloc for url in self.asked} == {self._host}

    async def accessible(self) -> None:
        """Raises AssertionError with what axe finds amiss: names, roles, contrast, order."""
        found: Any = (await Axe().run(self.page)).response
        assert found["passes"], "axe did not run"
        amiss = [
            f"{v['id']}: {v['help']}: {[n['html'][:120] for n in v['nodes']]}"
            for v in found["violations"]
        ]
        assert not amiss, "\n".join(amiss)

    async def fits(self) -> None:
        """Nothing stands out to the right of the screen."""
        out = await self.page.evaluate(
            "[...document.querySelectorAll('body *')].filter((e) =>"
            " e.getBoundingClientRect().right > innerWidth + 1)"
            ".map((e) => e.outerHTML.slice(0, 120))"
        )
        assert not out, out
        # Nor is anything cut off inside of its box, but what only screen readers get.
        cut = await self.page.evaluate(
            "[...document.querySelectorAll('main *')].filter((e) => e.clientWidth > 1 &&"
            " e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 120))"
        )
        assert not cut, cut


@contextlib.asynccontextmanager
async def tab(browser: Browser, url: str, **options: Any) -> AsyncIterator[Watched]:
    """``/ui`` of the router at ``url``, in a profile of its own."""
    context = await browser.new_context(**{"viewport": LAPTOP, **options})
    try:
        watched = Watched(await context.new_page(), url)
        await watched.page.goto(f"{url}/ui")
        yield watched
    finally:
        await context.close()
