"""The load generator against a real HTTP server that does what the test says, when it says so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from bench.canned import MODEL, Canned, Fault, Manner
from bench.http_load import run_http
from bench.serve.options import Options
from bench.serve.result import Result, read
from bench.serve.run import run
from bench.workload import Workload
from protocol.errors import StartupError

QUIET = Console(quiet=True)
FIRST_S, GAP_S = 0.1, 0.03


async def _run(manner: Manner, **more: object) -> tuple[Result, Canned]:
    canned = Canned(manner)
    async with canned.serving() as url:
        options = Options(url=url, **{"warmup": 1, "output": "8", **more})  # type: ignore[arg-type]
        return await run(options, QUIET, keep_records=True), canned


@pytest.mark.alone
async def test_what_it_measures_is_what_the_server_did() -> None:
    found, canned = await _run(
        Manner(FIRST_S, GAP_S), rate=20.0, arrivals="constant", requests=20, ttft_slo_ms=200.0
    )
    s = found.summary
    assert (s.ok, s.errors, found.interrupted, found.model) == (20, {}, False, MODEL)
    assert s.latencies["ttft_ms"].p50 == pytest.approx(1e3 * FIRST_S, abs=40)
    assert s.latencies["tpot_ms"].p50 == pytest.approx(1e3 * GAP_S, abs=15)
    assert s.latencies["itl_ms"].p50 == pytest.approx(1e3 * GAP_S, abs=15)
    assert s.latencies["e2e_ms"].p50 == pytest.approx(1e3 * (FIRST_S + 7 * GAP_S), abs=150)
    assert s.offered_rate == pytest.approx(20.0, rel=0.01)
    assert s.span_s == pytest.approx(19 / 20 + FIRST_S + 7 * GAP_S, abs=0.5)
    assert s.output_tokens_per_s == pytest.approx(160 / s.span_s)
    assert s.prompt_tokens is not None
    assert s.prompt_tokens.mean == 128  # by the server's count
    assert s.cached_share == 0.5
    assert s.tokens_per_arrival == pytest.approx(1.0, abs=0.3)
    assert s.goodput == pytest.approx(20 / s.span_s, rel=0.3)
    assert len({tuple(body["prompt"]) for body in canned.bodies}) == 22  # probe, warm-up, load
    assert len(found.records or []) == 20


@pytest.mark.alone
async def test_tokens_in_one_chunk_are_counted() -> None:
    found, _ = await _run(Manner(0.0, GAP_S, together=4), concurrency=2, requests=6)
    s = found.summary
    assert s.tokens_per_arrival == pytest.approx(4.0)
    assert s.latencies["itl_ms"].p50 == pytest.approx(1e3 * GAP_S, abs=15)
    assert s.latencies["tpot_ms"].p50 == pytest.approx(1e3 * GAP_S / 7, abs=3)
    assert s.offered_rate is None


@pytest.mark.alone
async def test_times_count_from_when_a_request_was_due() -> None:
    """One at a time, each of 0.2 s, ten due at once: the last one waits 1.8 s, and that shows."""
    found, _ = await _run(Manner(0.2), rate=1000.0, requests=10, max_in_flight=1, output="3")
    s = found.summary
    assert s.latencies["ttft_ms"].most == pytest.approx(2000, abs=300)
    assert s.latencies["ttft_from_sent_ms"].most == pytest.approx(200, abs=80)
    assert found.health.held == 9
    assert "9 requests waited because 1 were in flight" in found.health.warnings[-1]


@pytest.mark.alone
async def test_a_closed_loop_holds_its_number_for_its_time() -> None:
    found, _ = await _run(Manner(0.05), concurrency=3, duration_s=0.6, output="3")
    assert 15 <= found.summary.ok <= 3 * (0.6 / 0.05 + 1)
    assert found.timeline.in_flight[0] == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("500", "HTTP 500"),
        ("hang-up", "hung up"),
        ("half", "hung up"),
        ("silence", "timeout"),
        ("malformed", "malformed stream"),
        ("error", "error in the stream"),
        ("cut", "cut short"),
    ],
)
async def test_failures_are_told_apart(fault: Fault, error: str) -> None:
    found, _ = await _run(
        Manner(faults=("", fault)), concurrency=1, requests=4, warmup=0, timeout_s=0.5
    )
    s = found.summary
    assert (s.ok, s.errors) == (2, {error: 2})
    assert s.latencies["ttft_ms"].count == 2
    if fault in ("500", "error"):
        assert s.messages[error] in ("out of [red]luck[/]", "the engine died")


@pytest.mark.parametrize(
    ("manner", "endpoint", "says", "kind"),
    [
        (Manner(), "completions", "prompts as token ids; token counts from each chunk", list),
        (
            Manner(refused=("return_token_ids",)),
            "completions",
            "ids; token counts from usage",
            list,
        ),
        (Manner(ids=False), "completions", "text; token counts from each chunk", str),
        (
            Manner(ids=False, refused=("return_token_ids", "stream_options")),
            "completions",
            "text; token counts from chunks counted",
            str,
        ),
        (Manner(refused=("return_token_ids",)), "chat", "text; token counts from usage", str),
    ],
)
async def test_the_words_are_those_that_the_server_takes(
    manner: Manner, endpoint: str, says: str, kind: type
) -> None:
    found, canned = await _run(manner, concurrency=1, requests=2, endpoint=endpoint)
    assert says in found.dialect
    assert found.summary.output_tokens is not None
    last = canned.bodies[-1]
    assert isinstance(
        last["messages"][0]["content"] if endpoint == "chat" else last["prompt"], kind
    )
    assert last["max_tokens"] == 8


async def test_a_server_that_takes_nothing_is_reported_with_its_words() -> None:
    with pytest.raises(StartupError, match="temperature: not known here"):
        await _run(Manner(refused=("temperature",)), concurrency=1, requests=2)


async def test_nobody_there() -> None:
    with pytest.raises(StartupError, match="no answer"):
        await run(Options(url="http://127.0.0.1:9", concurrency=1), QUIET)


async def test_the_key_is_sent_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-hidden")
    found, _ = await _run(Manner(), concurrency=1, requests=1, api_key_env="SOME_KEY")
    assert "sk-hidden" not in repr(found)
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(StartupError, match="SOME_KEY is not set"):
        await _run(Manner(), concurrency=1, requests=1, api_key_env="SOME_KEY")


def _serving(manner: Manner) -> tuple[str, Canned, threading.Event]:
    """A server in a thread, until the event is set."""
    stop, ready = threading.Event(), threading.Event()
    urls: list[str] = []
    canned = Canned(manner)

    async def serve() -> None:
        async with canned.serving() as url:
            urls.append(url)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert ready.wait(10)
    return urls[0], canned, stop


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "cluster.cli", "bench", *args]


def test_ctrl_c_reports_what_there_is(tmp_path: Path) -> None:
    url, canned, stop = _serving(Manner(0.02, 0.02))
    out = tmp_path / "a.json"
    load = ("--rate", "20", "--duration", "60", "--output", "4")
    child = subprocess.Popen(
        _command("serve", "--url", url, *load, "--json", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stderr is not None
    assert child.stderr.readline()  # the server is tried, the warm-up begins
    while len(canned.bodies) < 50 and child.poll() is None:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGINT)
    said, _ = child.communicate(timeout=20)
    stop.set()
    assert child.returncode == 130
    assert b"Interrupted" in said
    found = read(out)
    assert found.interrupted
    assert found.summary.ok > 5
    assert not found.summary.errors


def test_the_command_writes_a_page_and_compares(tmp_path: Path) -> None:
    url, _, stop = _serving(Manner())
    a, b, html = (str(tmp_path / name) for name in ("a.json", "b.json", "p.html"))
    for out in (a, b):
        load = ("--concurrency", "2", "--requests", "6", "--output", "4", "--json", out)
        subprocess.run(_command("serve", "--url", url, *load), check=True, capture_output=True)
    stop.set()
    shown = subprocess.run(
        _command("compare", a, b, "--html", html), check=True, capture_output=True, text=True
    )
    assert "TTFT p50" in shown.stdout
    assert "baton bench compare" in Path(html).read_text()
    assert json.loads(Path(a).read_text())["summary"]["ok"] == 6


def test_it_needs_neither_a_cluster_nor_torch() -> None:
    check = (
        "import sys, bench.serve.command, bench.serve.run, bench.serve.page;"
        "sys.exit(bool({'torch', 'cluster', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_mistakes_end_with_2() -> None:
    done = subprocess.run(_command("serve", "--rate", "0"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "baton bench: --rate: must be above 0, not 0.0" in done.stderr


@pytest.mark.alone
async def test_the_stack_bench_uses_it() -> None:
    workload = Workload(3, 6, 16, 5, vocab=500, seed=1)
    async with Canned(Manner(0.05, 0.02)).serving() as url:
        found = await run_http(url, MODEL, workload)
    assert found.ttft_ms == pytest.approx(50, abs=40)
    assert found.tpot_ms == pytest.approx(20, abs=12)
    async with Canned(Manner(faults=("cut",))).serving() as url:
        with pytest.raises(RuntimeError, match="cut short"):
            await run_http(url, MODEL, workload)
