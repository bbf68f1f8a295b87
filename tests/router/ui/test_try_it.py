"""The box "Try it" of the live page in a real browser, over fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect
from tokenizers import Tokenizer

from tests.router.conftest import Cluster, Start, served, until
from tests.router.fake_worker import outputs
from tests.workers.browser import PHONE, Watched, tab

pytestmark = pytest.mark.system

HTML = "<img src=x onerror=alert(1)>"
COMPLETE = re.compile("^The (answer|model) has")


@contextlib.asynccontextmanager
async def shown(browser: Browser, cluster: Cluster, **options: Any) -> AsyncIterator[Watched]:
    """The page of the cluster's router."""
    async with served(cluster.app) as url, tab(browser, url, **options) as seen:
        yield seen


async def send(page: Page, prompt: str = "hello", *, kind: str = "text", limit: int = 12) -> None:
    await page.get_by_label("Prompt", exact=True).fill(prompt)
    await page.get_by_label("Send as").select_option(kind)
    await page.get_by_label("Max tokens").fill(str(limit))
    await page.get_by_role("button", name="Send").click()


def progress(page: Page) -> Any:
    return page.locator("#progress")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_answer_is_shown_with_its_figures_and_its_placement(
    browser: Browser, start: Start, scheme: str
) -> None:
    cluster = await start(outputs(delay=0.01))
    async with shown(browser, cluster, color_scheme=scheme) as seen:
        page = seen.page
        await send(page, "hello", kind="chat")
        await expect(progress(page)).to_have_text("The answer has reached its limit of tokens.")
        await expect(page.locator("#answer")).not_to_be_empty()
        await expect(page.locator("#figures")).to_contain_text(re.compile(r"tokens\s*12"))
        await expect(page.locator("#timeline")).to_contain_text("then 11 more tokens")
        await expect(page.locator("#timeline .steps li").first).to_contain_text("routing")
        assert await page.locator(".ticks path").get_attribute("d")
        await page.get_by_text("Why these workers").click()
        table = page.get_by_role("table", name="Predictions for each placement")
        await expect(table.get_by_role("row")).to_have_count(2)
        await expect(table).to_contain_text(f"{cluster.workers[0].instance[:6]} (chosen)")
        await seen.accessible()
        await seen.fits()
        seen.check()


async def test_text_appears_while_it_is_generated(browser: Browser, start: Start) -> None:
    cluster = await start(outputs(delay=0.05))
    async with shown(browser, cluster) as seen:
        page = seen.page
        await send(page, limit=400)
        await expect(progress(page)).to_have_text("The answer is being generated.")
        await expect(page.locator("#answer")).to_contain_text("hellohello")
        await page.get_by_role("button", name="Stop").click()


async def test_answer_of_the_model_is_text(browser: Browser, start: Start) -> None:
    cluster = await start(outputs())
    async with shown(browser, cluster) as seen:
        await send(seen.page, HTML, limit=200)
        await expect(progress(seen.page)).to_have_text(COMPLETE)
        await expect(seen.page.locator("#answer")).to_contain_text(HTML)
        assert await seen.page.locator("#try img").count() == 0
        seen.check()


async def test_stop_cancels_the_request_on_the_worker(browser: Browser, start: Start) -> None:
    cluster = await start(outputs(delay=0.05))
    async with shown(browser, cluster) as seen:
        page = seen.page
        await page.get_by_label("Prompt", exact=True).fill("hello")
        await page.get_by_label("Send as").select_option("text")
        await page.get_by_label("Max tokens").fill("1000")
        await page.get_by_label("Prompt", exact=True).press("Control+Enter")
        await expect(page.locator("#answer")).not_to_be_empty()
        await page.get_by_role("button", name="Stop").press("Enter")
        await expect(progress(page)).to_contain_text("Stopped")
        await until(lambda: len(cluster.workers[0].cancelled) == 1)
        await expect(page.get_by_role("button", name="Send")).to_be_focused()
        await expect(page.locator("#failure")).to_be_empty()
        await expect(page.locator("#anatomy")).to_be_hidden()
        await send(page)
        await expect(progress(page)).to_have_text(COMPLETE)
        seen.check()


async def test_refused_prompt_is_explained(browser: Browser, start: Start) -> None:
    cluster = await start(outputs())
    async with shown(browser, cluster) as seen:
        page = seen.page
        await send(page, limit=100_000)
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("status 400")
        await expect(alert).to_contain_text("(context_length_exceeded)")
        await expect(page.locator("#result")).to_be_hidden()
        await send(page)
        await expect(progress(page)).to_have_text(COMPLETE)
        await expect(page.locator("#failure")).to_be_empty()
        seen.check("400")


async def test_error_inside_a_stream_is_explained(browser: Browser, start: Start) -> None:
    cluster = await start(outputs(delay=0.02, error_after=4, retryable=False))
    async with shown(browser, cluster) as seen:
        page = seen.page
        await send(page)
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("The answer broke off with an error")
        await expect(alert).to_contain_text("(worker_error)")
        await expect(page.locator("#answer")).not_to_be_empty()
        await expect(progress(page)).to_have_text("The answer is not complete.")
        await seen.accessible()
        seen.check()


async def answer_with(page: Page, events: list[Any], status: int = 200) -> None:
    """Answer the page's next completions with these events."""
    body = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)

    async def fulfil(route: Any) -> None:
        await route.fulfill(status=status, headers={"content-type": "text/event-stream"}, body=body)

    await page.route("**/v1/c*ompletions", fulfil)
    await page.route("**/v1/chat/completions", fulfil)


async def test_stream_without_an_end_is_not_complete(browser: Browser, start: Start) -> None:
    cluster = await start(outputs())
    async with shown(browser, cluster) as seen:
        await answer_with(seen.page, [{"choices": [{"text": "def"}]}])
        await send(seen.page)
        await expect(seen.page.get_by_role("alert")).to_contain_text("The connection was lost")
        await expect(seen.page.locator("#answer")).to_have_text("def")


async def test_status_without_an_explanation(browser: Browser, start: Start) -> None:
    cluster = await start(outputs())
    async with shown(browser, cluster) as seen:
        await answer_with(seen.page, [HTML], status=502)
        await send(seen.page)
        await expect(seen.page.get_by_role("alert")).to_have_text(
            "The server answered with status 502."
        )


async def test_reasoning_stands_apart_from_the_answer(browser: Browser, start: Start) -> None:
    cluster = await start(outputs())
    thought = {"reasoning": "I think", "reasoning_content": "I think"}
    deltas = [{"role": "assistant", "content": ""}, thought, {"content": "Four."}]
    events = [
        {"choices": [{"delta": delta}], "usage": {"completion_tokens": i}}
        for i, delta in enumerate(deltas)
    ]
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    async with shown(browser, cluster) as seen:
        page = seen.page
        await answer_with(page, [*events, end, "[DONE]"])
        await send(page, kind="chat")
        await expect(progress(page)).to_have_text("The model has ended its answer.")
        await expect(page.locator("#reasoning pre")).to_have_text("I think")
        await expect(page.locator("#answer")).to_have_text("Four.")
        await seen.accessible()


async def test_model_without_a_template_continues_text(
    browser: Browser, start: Start, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cluster = await start(outputs(), model_path=str(tmp_path))
    async with shown(browser, cluster) as seen:
        await send(seen.page, kind="chat")
        await expect(progress(seen.page)).to_have_text(COMPLETE)
        await expect(seen.page.locator("#kind-note")).to_contain_text("no chat template")
        await expect(seen.page.get_by_label("Send as")).to_have_value("text")
        seen.check("400")


KEYS = """
sk-sends: {tenant: acme}
sk-looks: {tenant: acme, scopes: [monitor]}
"""


async def test_key_is_used_and_kept_nowhere(browser: Browser, start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    cluster = await start(outputs(), api_keys=str(keys))
    async with shown(browser, cluster) as seen:
        page = seen.page
        # This key shows figures only, so that the box asks for one that may send prompts.
        key = page.get_by_label("API key")
        await key.fill("sk-looks")
        await key.press("Enter")
        await send(page)
        await expect(page.get_by_role("alert")).to_contain_text("(insufficient_scope)")
        own = page.get_by_label("Key for prompts")
        await expect(own).to_be_focused()
        await own.fill("schlüssel")
        await own.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("printable ASCII")
        await own.fill("sk-sends")
        await own.press("Enter")
        await expect(progress(page)).to_have_text(COMPLETE)
        await page.get_by_role("button", name="Forget the key").click()
        assert await own.input_value() == ""
        # This one sends prompts only, so that there are no figures.
        await key.fill("sk-sends")
        await key.press("Enter")
        await expect(page.locator("#notice")).to_contain_text("lacks the scope monitor")
        await expect(page.locator("#pools")).to_be_hidden()
        await send(page)
        await expect(progress(page)).to_have_text(COMPLETE)
        await seen.accessible()
        stores = "document.cookie + JSON.stringify([localStorage, sessionStorage])"
        assert await page.evaluate(stores) == "[{},{}]"
        assert all("sk-" not in url for url in seen.asked)
        await page.reload()
        await expect(key).to_be_focused()
        seen.check("401", "403")


async def test_phone(browser: Browser, start: Start) -> None:
    cluster = await start(outputs())
    async with shown(browser, cluster, viewport=PHONE, has_touch=True) as seen:
        await send(seen.page, "hello " * 40, limit=60)
        await expect(progress(seen.page)).to_have_text(COMPLETE)
        await seen.page.get_by_text("Why these workers").click()
        await seen.fits()
        await seen.accessible()
        seen.check()


EVENTS = ['{"a":1}', "two\nlines", "ü🦊", "[DONE]"]
PARSE = """async (pieces) => {
  const { EventParser } = await import('/ui/sse.js');
  const parser = new EventParser();
  return pieces.flatMap((piece) => parser.push(piece));
}"""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_events_cut_at_any_place_are_the_same(
    browser: Browser, start: Start, end: str
) -> None:
    lines = [":", "", ": keep-alive", ""]
    for event in EVENTS:
        lines += ["event: x", *(f"data: {line}" for line in event.split("\n")), "id: 7", "", ""]
    text = end.join(lines) + end
    draw = random.Random(5)
    cluster = await start(outputs())
    async with shown(browser, cluster) as seen:
        for size in [1, 2, 3, len(text), *(draw.randrange(1, 40) for _ in range(20))]:
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            assert await seen.page.evaluate(PARSE, pieces) == EVENTS
        await asyncio.sleep(0)
