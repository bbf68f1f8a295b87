"""Bodies that are small on the wire and large in a process: they do not keep the event loop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from router.common.request_body import MAX_ITEMS, too_many_items
from router.http.server import freeze_gc
from tests.router.conftest import MODEL, Start
from tests.router.errors import check
from tests.router.fake_worker import outputs

MOST_S = 0.5  # of the event loop's processor: twice the aim, as machines that run tests are busy
ALL = (8 << 20) - 1024
TAKEN_APART = 1_500_000  # bytes of members of which there are not too many
SMALL = 200_000  # bytes of a parameter that is not too large

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = '"prompt":"x"'
HI = '"messages":[{"role":"user","content":"x"}]'
MEMBER = '"k%d":1'
BAD = '{"role":"user","content":1,"a":1,"b":2}'
CALLS = (
    '{"role":"assistant","tool_calls":[{"id":"1","type":"function",'
    '"function":{"name":"f","arguments":"{[%s]}"}}]}'
)
COMPLEX = "body_too_complex"
UNKNOWN = "unknown_parameter"


def many(unit: str, size: int = ALL) -> str:
    """``unit`` again and again; ``%d`` in it is a number that counts up."""
    if "%d" not in unit:
        return ",".join([unit] * (size // (len(unit) + 1)))
    return ",".join([unit % i for i in range(100_000, 100_000 + size // (len(unit) + 5))])


BODIES: list[tuple[str, Callable[[], str], str | None, str | None]] = [
    # Too many things of whatever kind
    (COMPLETIONS, lambda: f"{PROMPT},{many(MEMBER)}", None, COMPLEX),
    (COMPLETIONS, lambda: f'"prompt":[{many("[]")}]', None, COMPLEX),
    (COMPLETIONS, lambda: f'"prompt":[{many("{}")}]', None, COMPLEX),
    (COMPLETIONS, lambda: f'"prompt":[{many("[[1]]")}]', None, COMPLEX),
    (COMPLETIONS, lambda: '"prompt":[' + many('"a"') + "]", None, COMPLEX),
    (CHAT, lambda: f'"messages":[{{{many(MEMBER)}}}]', None, COMPLEX),
    # Names that nobody knows
    (COMPLETIONS, lambda: f'"prompt":1,{many(MEMBER, TAKEN_APART)}', "prompt", None),
    (
        CHAT,
        lambda: f'"messages":[{{"role":"user","content":1,{many(MEMBER, TAKEN_APART)}}}]',
        "messages[0].content",
        None,
    ),
    (
        CHAT,
        lambda: f'{HI},"tools":[{{"type":"function",{many(MEMBER, SMALL)}}}]',
        "tools[0].k100000",
        UNKNOWN,
    ),
    (
        CHAT,
        lambda: f'{HI},"response_format":{{"type":"text",{many(MEMBER, SMALL)}}}',
        "response_format.k100000",
        UNKNOWN,
    ),
    (
        COMPLETIONS,
        lambda: f'{PROMPT},"stream":true,"stream_options":{{{many(MEMBER, SMALL)}}}',
        "stream_options.k100000",
        UNKNOWN,
    ),
    (
        COMPLETIONS,
        lambda: f'{PROMPT},"structured_outputs":{{"regex":"a",{many(MEMBER, SMALL)}}}',
        "structured_outputs.k100000",
        UNKNOWN,
    ),
    # Mistakes of which there are many
    (CHAT, lambda: f'"messages":[{many("1")}]', "messages[0]", "invalid_value"),
    (CHAT, lambda: f'"messages":[{many(BAD, 600_000)}]', "messages[0].content", None),
    (CHAT, lambda: f'{HI},"metadata":{{{many(MEMBER, SMALL)}}}', "metadata", None),
    (COMPLETIONS, lambda: f'{PROMPT},"logit_bias":{{{many(MEMBER, SMALL)}}}', "logit_bias", None),
    (CHAT, lambda: f'"messages":[{CALLS % many("[]", ALL // 2)}]', "messages", COMPLEX),
    # Parameters that are too large
    (CHAT, lambda: f'{HI},"tools":[{many("1.5")}]', "tools", "schema_too_large"),
    (
        CHAT,
        lambda: f'{HI},"chat_template_kwargs":{{"a":[{many("[]", TAKEN_APART // 3)}]}}',
        "chat_template_kwargs",
        None,
    ),
    (
        COMPLETIONS,
        lambda: f'{PROMPT},"guided_json":{{"enum":[{many("1")}]}}',
        "guided_json",
        "schema_too_large",
    ),
    (COMPLETIONS, lambda: f'{PROMPT},"stop":[{many("1")}]', "stop", None),
    (COMPLETIONS, lambda: f'{PROMPT},"user":"{many("1")}"', "user", None),
    # Prompts
    (COMPLETIONS, lambda: f'"prompt":[{many("1")}]', "prompt", None),
    (COMPLETIONS, lambda: f'"prompt":[{many("1.5")}]', "prompt", None),
    (COMPLETIONS, lambda: '"prompt":"' + '\\"' * (ALL // 2) + '"', "prompt", None),
]


async def longest_gap() -> float:
    """Runs until it is cancelled; then, how long the event loop was kept at most: seconds
    of its thread's processor time, so that other processes do not count."""
    longest, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.002)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
    except asyncio.CancelledError:
        return max(longest, time.thread_time() - last)


@pytest.fixture
def settled() -> Iterator[None]:
    """The heap as a router's is: the tests' own is left alone by the garbage collector."""
    freeze_gc()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("path", "make", "param", "code"), BODIES)
async def test_it_is_refused_at_once(
    start: Start, path: str, make: Callable[[], str], param: str | None, code: str | None
) -> None:
    cluster = await start(outputs())
    body = f'{{"model":"{MODEL}",{make()}}}'.encode()
    headers = {"content-type": "application/json"}
    watch = asyncio.create_task(longest_gap())
    await asyncio.sleep(0.01)
    answer = await cluster.client.post(path, content=body, headers=headers)
    watch.cancel()
    gap = await watch
    error = answer.json()["error"]
    told = "context_length_exceeded" if param == "prompt" and error["code"] else code
    check(answer, 400, param, told, "")
    print(f"{path} {param} {code}: {gap * 1e3:.0f} ms")
    assert gap < MOST_S, f"{gap:.3f} s"
    assert not cluster.workers[0].requests


@pytest.mark.parametrize("field", ["guided_grammar", "guided_regex"])
async def test_an_older_name_is_bounded_as_the_newer(start: Start, field: str) -> None:
    cluster = await start(outputs())
    for size in (17_000, 200_000):
        answer = await cluster.post(prompt="x", **{field: 'start: "a"' + " " * size})
        check(answer, 400, field, None, "at most 16384")


def test_what_is_loaded_is_left_alone() -> None:
    """In a process of its own: nothing of it would be collected in this one."""
    code = (
        "import gc, router.http.app, router.http.server as server; server.freeze_gc(); "
        "print(gc.get_freeze_count())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 50_000


def test_what_counts_is_outside_of_strings() -> None:
    code = '{"a": ["b", {}]}, \\\\ \\" '.replace('"', '\\"').encode()
    assert not too_many_items(b'{"prompt": "' + code * 100_000 + b'"}')
    assert not too_many_items(b"[" + b"1," * 4_000_000 + b"1]")
    assert not too_many_items(b"[" + b"[]," * (MAX_ITEMS - 2) + b"[]]")
    assert too_many_items(b"[" + b"[]," * (MAX_ITEMS - 1) + b"[]]")
    assert too_many_items(b'["\\\\", ' + b'"\\"",' * MAX_ITEMS + b"1]")
    assert not too_many_items(b'"' + b'\\"' * 4_000_000), "a string that does not end"
