"""Which role an engine process has, whenever its front changed it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.lib.settings import engine_settings
from engine.process.client import EngineClient
from engine.process.session import EngineSession

ENGINE = """
import os, socket, sys, time
from pathlib import Path
import msgspec
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.kv_cache.kv_format import KVFormat
from engine.ipc.settings import EngineSettings

spec = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSettings)
kv = KVFormat(
    precision="exact", storage="wide", layers=1, kv_heads=1, head_dim=2, element_bytes=4
)
channel = EngineChannel(socket.socket(fileno=int(sys.argv[1])), m.Command)
while Path(spec.model_path, "hold").exists():
    time.sleep(0.005)
channel.send([m.EngineReady("f", 8, 32, kv, 32, 0.01)])
roles = [spec.role]
try:
    while True:  # the load in its beats encodes the roles it was given, in order
        channel.send([m.EngineBeat(int("".join(str(1 + (r == "decode")) for r in roles)), 0, 0, 1)])
        roles += [c.role for c in channel.receive(0.05) if isinstance(c, m.TakeRole)]
except ChannelClosed:
    pass
"""
P, D = "1", "2"


async def wait_for_roles(client: EngineClient, *roles: str) -> EngineSession:
    """Wait until an engine reports that it was given these roles."""
    async with asyncio.timeout(20):
        while True:
            session = await client.session(20.0)
            if session.beat.running == int("".join(roles)):
                return session
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("when", ["serving", "gone", "loading"])
async def test_every_engine_takes_the_role_of_its_worker(tmp_path: Path, when: str) -> None:
    spec = engine_settings(str(tmp_path), "prefill")
    client = EngineClient([sys.executable, "-c", ENGINE], spec, lambda *_: None)
    await client.start()
    try:
        session = await wait_for_roles(client, P)
        if when == "serving":
            client.take_role("decode")
            await wait_for_roles(client, P, D)
        hold = tmp_path / "hold"
        hold.touch()
        os.kill(session.process.pid, signal.SIGKILL)
        if when == "gone":
            client.take_role("decode")
        while client.current is session:
            await asyncio.sleep(0.005)
        if when == "loading":
            await asyncio.sleep(0.05)
            client.take_role("decode")
        hold.unlink()
        await wait_for_roles(client, *((P, D) if when == "loading" else (D,)))
        client.take_role("prefill")
        await wait_for_roles(client, *((P, D, P) if when == "loading" else (D, P)))
    finally:
        await client.stop()
