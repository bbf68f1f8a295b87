"""`bench.kv_link`: pairs of processes, what they move, and the simulated tail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.kv_link.child import cpu_seconds
from bench.kv_link.field import OPTIONAL, LinkField
from bench.kv_link.media.memory import MIB
from bench.kv_link.pairs import LinkPair, LinkRun
from bench.kv_link.product.pool_engine import CHECK, PACED, PAYLOAD, POOLS, STEP_BLOCKS, STEP_S
from bench.kv_link.product.shapes import SHAPES
from bench.kv_link.results import PartResult, middle_rate
from bench.kv_link.simulated_tail import SimulatedTransfer
from bench.kv_link.tail_part import BEYOND_S, least_tail_s


@pytest.fixture(scope="module")
def pair() -> Iterator[LinkPair]:
    made = LinkPair()
    yield made
    made.close()


@pytest.mark.parametrize("medium", ["socket", "grpc", "gloo", "memcpy"])
def test_bare_medium_moves_the_bytes(pair: LinkPair, medium: str) -> None:
    pair.open(medium, medium)
    run = pair.run(medium, 3 * MIB)
    assert run.nbytes == 3 * MIB
    assert run.seconds > 0
    pair.check(medium, 3 * MIB)


def test_bytes_that_did_not_come_are_noticed(pair: LinkPair) -> None:
    pair.open("half", "socket")
    pair.run("half", MIB)
    with pytest.raises(RuntimeError, match="digest"):
        pair.check("half", 2 * MIB)


@pytest.mark.parametrize("exists", [False, True])
def test_nixl_is_left_out_with_the_reason(tmp_path: Path, exists: bool) -> None:
    python = tmp_path / "python"
    if exists:
        python.write_text("#!/bin/sh\necho there is no NIXL here >&2\nexit 1\n")
        python.chmod(0o700)
    field = LinkField()
    try:
        assert field._open_nixl("NIXL tcp", python) == []
        (reason,) = field.left_out
        assert ("there is no NIXL here" if exists else "No such file") in reason
    finally:
        field.close()


def test_death_of_an_end_is_an_error_and_leaves_no_process() -> None:
    pair = LinkPair()
    try:
        pair.open("m", "socket")
        ends = {end._process.pid for end in (pair._sender, pair._receiver)}
        pair._receiver._process.kill()
        with pytest.raises(RuntimeError, match="receiver"):
            pair.run("m", MIB)
    finally:
        pair.close()
    assert not ends & {child.pid for child in psutil.Process().children()}


def test_stopped_ends_are_idle_between_runs() -> None:
    pair = LinkPair(stopped_between=True)
    try:
        pair.open("m", "socket")
        pair.run("m", MIB)
        sender = psutil.Process(pair._sender._process.pid)
        deadline = time.monotonic() + 5
        while sender.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sender.status() == psutil.STATUS_STOPPED
        pair.run("m", MIB)  # wakes them
    finally:
        pair.close()
    assert not sender.is_running()


THREADS_THAT_END = """
import threading, time
print(flush=True)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    threads = [threading.Thread(target=int) for _ in range(20)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_cpu_seconds_are_counted_while_threads_end() -> None:
    command = [sys.executable, "-c", THREADS_THAT_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before, deadline = cpu_seconds(), time.monotonic() + 1
        while time.monotonic() < deadline:
            last = cpu_seconds()
        child.kill()
    assert last > before


@pytest.mark.e2e
@pytest.mark.parametrize("has_engine", [False, True])
def test_product_moves_kv_by_every_carrier(pair: LinkPair, has_engine: bool) -> None:
    options = {"shape": "demo", "tls": None, "engine": has_engine}
    name = f"product {has_engine}"
    opened = pair.open(name, "product", options, receiver_starts=True)
    assert {"local", "tcp", "grpc"} <= set(opened["carriers"])
    for carrier in set(opened["carriers"]) - set(OPTIONAL):
        for codec, mode in (("raw", CHECK), ("fp8", CHECK), ("raw", POOLS), ("raw", PAYLOAD)):
            run = pair.run(name, 2 * MIB, carrier=carrier, codec=codec, mode=mode)
            assert run.nbytes > 0
            assert run.details["frames"] > 0
        if has_engine:
            paced = pair.run(name, 0, carrier=carrier, codec="raw", mode=PACED, blocks=64)
            assert paced.details["tail_bytes"] <= paced.nbytes


def test_wrong_kv_is_noticed() -> None:
    import torch

    from bench.kv_link.product.pool_engine import digest, fill

    shape = SHAPES["demo"].kv_format
    first = torch.zeros(shape.layers, 3, 32, 2, shape.kv_heads, shape.head_dim)
    fill(first)
    other = first.clone()
    assert digest(first) == digest(other)
    other[1, 2, 3, 1, 0, 5] += 1
    assert digest(first) != digest(other)
    assert not torch.equal(first[:, 0], first[:, 1]), "pages differ, so that their order counts"


# ---- results ------------------------------------------------------------------------------------


def test_rates_are_of_bytes_and_seconds() -> None:
    runs = [LinkRun(nbytes=10**9, seconds=s, cpu_s=2 * s) for s in (1.0, 0.5, 0.25)]
    assert middle_rate(runs) == pytest.approx(2.0)
    assert runs[1].cpu_s_per_gb == pytest.approx(1.0)


def test_aims_say_whether_they_are_met() -> None:
    result = PartResult([], [])
    result.add_aim("rate", 0.79, 0.8)
    result.add_aim("rate", 0.8, 0.8)
    result.add_limit("tail", 11.0, 10.0, " ms")
    assert ["MISSED" in line for line in result.aims] == [True, False, True]


# ---- the tail -----------------------------------------------------------------------------------


def test_least_tail_of_a_link_that_keeps_up_is_the_last_step() -> None:
    steps = [25_000_000] * 4
    assert least_tail_s(steps, 2e9) == pytest.approx(0.0125)
    assert least_tail_s(steps, 0.5e9) == pytest.approx(4 * 0.05 + STEP_S - 4 * STEP_S)


@pytest.mark.parametrize("link_bytes_s", [1e9, 25e9])
@pytest.mark.parametrize("frame_bytes", [1 << 20, 4 << 20])
def test_simulated_tail_is_that_of_the_link(link_bytes_s: float, frame_bytes: int) -> None:
    shape, count = SHAPES["8B"], 16
    steps = [(STEP_S * (n + 1), STEP_BLOCKS * (n + 1)) for n in range(count)]
    tail_s = SimulatedTransfer(shape, link_bytes_s, frame_bytes, steps).tail_s()
    least_s = least_tail_s([STEP_BLOCKS * shape.block_bytes] * count, link_bytes_s)
    assert least_s <= tail_s <= least_s + BEYOND_S
