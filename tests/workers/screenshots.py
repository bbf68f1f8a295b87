"""The pictures of the live page in docs/images. Two minutes; for an otherwise idle machine:

python -m tests.workers.screenshots
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import Page

from bench.lib.settings import speculation_settings
from tests.workers import watched
from tests.workers.browser import PHONE, chromium, tab

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 224 * 1024
SECONDS = 100
SMALL = {"width": 1180, "height": 800}  # a laptop's window, less the bytes of a whole screen
DRAFTS = speculation_settings("ngram")
ROLES = ("prefill", "decode", "decode")

SHOTS: dict[str, dict[str, Any]] = {
    "ui-laptop": {"viewport": SMALL},
    "ui-dark": {"viewport": SMALL, "color_scheme": "dark"},
    "ui-phone": {"viewport": PHONE},
    "ui-try": {"viewport": SMALL},
}


async def send_prompt(page: Page) -> None:
    """Fill in "Try it" and wait for the end of the answer."""
    await page.get_by_label("Prompt", exact=True).fill("def read_lines(path):")
    await page.get_by_label("Max tokens").fill("48")
    await page.get_by_role("button", name="Send").click()
    await page.locator("#timeline .steps").wait_for()


async def shoot(name: str, page: Page) -> None:
    path = IMAGES / f"{name}.png"
    if name == "ui-try":
        await send_prompt(page)
        await page.locator("#try").screenshot(path=path)
    else:
        await page.screenshot(path=path, full_page=name == "ui-laptop")
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path.name} has {size} bytes, at most {MAX_BYTES} are wanted"
    print(f"{path.name}: {size} bytes")


async def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            watched.workers(Path(folder), ROLES, speculation=DRAFTS) as redis,
            watched.router(redis, len(ROLES)) as router,
            watched.load(router.url, 4.0, 48),
            chromium() as browser,
        ):
            tabs = {name: tab(browser, router.url, **how) for name, how in SHOTS.items()}
            pages = {name: (await each.__aenter__()).page for name, each in tabs.items()}
            await asyncio.sleep(SECONDS)
            for name, page in pages.items():
                await shoot(name, page)
            for each in tabs.values():
                await each.__aexit__(None, None, None)


if __name__ == "__main__":
    asyncio.run(main())
