"""Chromium for the tests of the live page over fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.system import needs
from tests.workers.browser import chromium


@pytest_asyncio.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    needs("chromium")
    async with chromium() as browser:
        yield browser
