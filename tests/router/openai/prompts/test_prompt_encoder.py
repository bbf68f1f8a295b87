"""Long texts and expensive chats: exact token ids, and a bounded cost for everybody else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from router.common.errors import ApiError, invalid
from router.common.work_lane import WorkClaim
from router.openai.bodies.messages import Messages
from router.openai.chat.template_files import load_template
from router.openai.prompts.prompt_encoder import (
    LONG_CHAT,
    LONG_PROMPT,
    VERY_LONG_PROMPT,
    PromptEncoder,
    TokenLimit,
    surround,
)
from tests.router.openai.chat.toy import CHATML, TOKENIZERS, save

MESSAGES: TypeAdapter[Any] = TypeAdapter(Messages)
WORDS = "def hello(self): return 1\n"
SILENT = """\
{%- if messages[0].content == 'loop' %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}
{%- if messages[0].content == 'fail' %}{{ messages.x.y }}{% endif %}
"""


def refuse(count: int, at_least: bool) -> None:
    if count > 10_000_000:
        raise invalid(f"{'at least ' if at_least else ''}{count} tokens", "prompt", "too_long")


FREE = TokenLimit(10_000_000, refuse)
ANY = WorkClaim("t")


@pytest.fixture(scope="module", params=["byte-level"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = TOKENIZERS[request.param]()
    return save(tmp_path_factory.mktemp("model"), tokenizer, SILENT + CHATML)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[PromptEncoder]:
    """Its children start once for all tests of a tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = load_template(str(folder), tokenizer)
    encoder = PromptEncoder(tokenizer, template, folder, render_cpu_s=0.3)
    yield encoder
    pids = encoder.children.pids
    encoder.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def limit(most: int) -> TokenLimit:
    def check(count: int, at_least: bool) -> None:
        if count > most:
            raise invalid(f"{'at least ' if at_least else ''}{count} tokens", "prompt", "too_long")

    return TokenLimit(most, check)


def chat(*texts: str) -> list[Any]:
    return list(MESSAGES.validate_python([{"role": "user", "content": text} for text in texts]))


@pytest.mark.parametrize("size", [0, LONG_PROMPT, VERY_LONG_PROMPT])
async def test_a_text_of_any_length_gives_the_same_tokens(
    encoder: PromptEncoder, size: int
) -> None:
    text = WORDS * (1 + size // len(WORDS)) + "é🦊"
    ids = encoder._tokenizer.encode(text).ids
    assert await encoder.encode_text(text, FREE, ANY) == ids
    kept = FREE._replace(kept=7)
    assert await encoder.encode_text(text, kept, ANY) == ids[-7:]
    assert await encoder.encode_text(text, limit(len(ids)), ANY) == ids
    with pytest.raises(ApiError, match=f"{len(ids)} tokens"):
        await encoder.encode_text(text, limit(len(ids) - 1), ANY)
    with pytest.raises(ApiError, match="surrogate"):
        await encoder.encode_text(text + "\ud800", FREE, ANY)


async def test_a_long_chat_gives_the_tokens_of_a_short_one(encoder: PromptEncoder) -> None:
    assert encoder._template is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"n": 10**30}}}]
    for texts in (["hi <s> é"], ["x <|im_end|>", WORDS * (LONG_CHAT // len(WORDS))]):
        messages = chat(*texts)
        text, mark = encoder._template.render(messages, tools, options={"y": 1})
        expected = encoder._template.encode(text, mark)
        ids = (await encoder.encode_chat(messages, tools, FREE, ANY, options={"y": 1})).ids
        assert ids == expected
        kept = FREE._replace(kept=7)
        cut = await encoder.encode_chat(messages, tools, kept, ANY, options={"y": 1})
        assert cut.ids == expected[-7:]
    with pytest.raises(ApiError, match="tokens"):
        await encoder.encode_chat(messages, tools, limit(len(ids) - 1), ANY)


def test_special_tokens_around_a_chat() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    assert surround(tokenizer, [7, 8]) == [7, 8]
    ends = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    assert surround(tokenizer, [7, 8]) == [ends[0][1], 7, 8, ends[1][1]]


async def test_what_cannot_fit_is_refused_before_it_is_tokenized(encoder: PromptEncoder) -> None:
    start = time.thread_time()
    with pytest.raises(ApiError, match="at least"):
        await encoder.encode_text("a" * (8 << 20), limit(4096), ANY)
    assert time.thread_time() - start < 0.3


async def test_a_silent_loop_ends_and_stops_no_stream(encoder: PromptEncoder) -> None:
    await encoder.encode_chat(chat("hi" * LONG_CHAT), [], FREE, ANY)  # a child is there
    longest, last = 0.0, time.thread_time()
    rendering = asyncio.create_task(encoder.encode_chat(chat("loop"), [], FREE, ANY))
    while not rendering.done():
        await asyncio.sleep(0.002)
        longest, last = max(longest, time.thread_time() - last), time.thread_time()
    with pytest.raises(ApiError, match=r"more than 0\.3 s") as error:
        await rendering
    assert (error.value.status, error.value.param) == (400, "messages")
    assert longest < 0.2, "10 ms of the event loop's processor time are spent on a chat"


async def test_a_chat_that_fails_says_why(encoder: PromptEncoder) -> None:
    with pytest.raises(ApiError, match="has no attribute") as error:
        await encoder.encode_chat(chat("fail"), [], FREE, ANY)
    assert (error.value.status, error.value.code) == (400, "invalid_messages")


async def test_a_deadline_ends_the_wait_and_kills_the_child(encoder: PromptEncoder) -> None:
    text = "a" * (4 << 20)
    await encoder.encode_text("a" * VERY_LONG_PROMPT, FREE, ANY)
    before = set(encoder.children.pids)
    start = time.perf_counter()
    with pytest.raises(ApiError) as error:
        await encoder.encode_text(text, FREE, WorkClaim("t", time.perf_counter() + 0.1))
    assert error.value.status == 429 and error.value.headers["retry-after"]
    assert time.perf_counter() - start < 1.0
    until = time.perf_counter() + 10
    while before <= set(encoder.children.pids) and time.perf_counter() < until:
        await asyncio.sleep(0.01)
    assert not before <= set(encoder.children.pids), "its child is gone"


async def test_a_flood_of_long_texts_delays_no_other_tenant(encoder: PromptEncoder) -> None:
    await encoder.encode_text("a" * VERY_LONG_PROMPT, FREE, WorkClaim("good"))
    due = WorkClaim("bad", time.perf_counter() + 30)
    flood = [
        asyncio.create_task(encoder.encode_text("a" * (1 << 20), FREE, due)) for _ in range(20)
    ]
    await asyncio.sleep(0.05)
    # Exactly as many threads as a tenant may have are busy, whatever the flood's length.
    assert sum(encoder._child_lane._slots._busy.values()) == 1
    text = WORDS * (2 * LONG_PROMPT // len(WORDS))
    ids = await encoder.encode_text(text, FREE, WorkClaim("good", time.perf_counter() + 5))
    assert ids and not all(task.done() for task in flood)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", "1", "é", "🦊", "语", "ab ", "'", "return", "\x00"]
)
def test_time_per_byte_has_a_bound(encoder: PromptEncoder, unit: str) -> None:
    """No input makes the tokenizer's time grow faster than n log n: runs without white space are
    the worst for BPE."""
    for size in (8 << 10, 128 << 10):
        text = unit * (size // len(unit.encode()))
        start = time.process_time()
        encoder._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        assert (time.process_time() - start) / size < 10e-6, "0.1 to 1 us"
