"""What a front makes of an engine process that is loading, or that says why it cannot go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.lib.settings import engine_settings
from engine.process import client
from engine.process.client import EngineClient
from engine.process.session import exit_text
from protocol.errors import StartupError

ENGINE = """
import socket, sys, time
from pathlib import Path
import msgspec
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.ipc.settings import EngineSettings
from engine.kv_cache.kv_format import KVFormat

settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSettings)
channel = EngineChannel(socket.socket(fileno=int(sys.argv[1])), m.Command)
kv = KVFormat(
    precision="exact", storage="wide", layers=1, kv_heads=1, head_dim=2, element_bytes=4
)
folder = Path(settings.model_path)


def ready():
    sizes = {"max_batch": settings.max_batch or 7, "prefill_chunk": settings.prefill_chunk or 9}
    channel.send([m.EngineReady("f", 8, 32, kv, 32, 0.01, **sizes)])
    channel.send([m.EngineBeat(settings.max_batch or 0, settings.prefill_chunk or 0, 0, 1)])


def wait():
    try:
        while True:
            channel.receive(0.05)
            channel.send([m.EngineBeat(settings.max_batch or 0, settings.prefill_chunk or 0, 0, 1)])
    except ChannelClosed:
        pass

"""
SILENCE_S = 1.0


async def started(folder: Path, script: str) -> tuple[EngineClient, list[str]]:
    reported: list[str] = []
    argv = [sys.executable, "-c", ENGINE + script]
    made = EngineClient(argv, engine_settings(str(folder)), lambda what, _: reported.append(what))
    try:
        await made.start()
    except BaseException:
        await made.stop()
        raise
    return made, reported


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOADING_SILENCE_S", SILENCE_S)


async def test_progress_keeps_an_engine_alive_that_loads_for_long(tmp_path: Path) -> None:
    script = """
for i in range(12):
    channel.send([m.Progress("compiling", i / 12)])
    time.sleep(0.25)
ready()
wait()
"""
    made, reported = await started(tmp_path, script)
    assert reported == ["compiling"] * 12  # three times as long as it may be silent
    await made.stop()


async def test_an_engine_that_makes_no_progress_is_ended_with_what_it_was_doing(
    tmp_path: Path,
) -> None:
    script = """
channel.send([m.Progress("loading weights", 0.5), m.Progress("warming up", 0.0)])
time.sleep(600)
"""
    with pytest.raises(StartupError, match="no progress for 1 s while it was warming up"):
        async with asyncio.timeout(20):
            await started(tmp_path, script)


async def test_an_engine_that_dies_while_it_loads_is_reported_with_what_it_was_doing(
    tmp_path: Path,
) -> None:
    script = """
channel.send([m.Progress("loading weights", 0.5)])
sys.exit(1)
"""
    with pytest.raises(StartupError, match="was loading weights: it exited with status 1"):
        await started(tmp_path, script)


async def test_an_engine_that_fails_in_a_step_says_why(tmp_path: Path) -> None:
    script = """
ready()
if not (folder / "again").exists():
    (folder / "again").touch()
    while not channel.receive(0.05):
        pass
    channel.send([m.EngineFailed("cuda:0 has no memory left")])
else:
    wait()
"""
    made, reported = await started(tmp_path, script)
    made.take_role("prefill")  # any command
    async with asyncio.timeout(20):
        while not made.restarts:
            await asyncio.sleep(0.01)
    assert reported == ["engine lost: cuda:0 has no memory left; starting another"]
    await made.stop()


async def test_a_successor_in_another_role_has_the_sizes_of_the_first(tmp_path: Path) -> None:
    made, _ = await started(tmp_path, "ready()\nwait()\n")
    first = await made.session(20.0)
    made.take_role("prefill")
    os.kill(first.process.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while (session := await made.session(20.0)) is first or not session.beat.running:
            await asyncio.sleep(0.01)
    assert (session.beat.running, session.beat.waiting) == (7, 9)
    await made.stop()


def test_the_end_of_an_engine_names_its_signal_or_status() -> None:
    assert exit_text(-9) == ": killed by signal 9 (SIGKILL): often out of memory"
    assert exit_text(-11) == ": killed by signal 11"
    assert exit_text(3) == ": it exited with status 3"
