"""What `baton bench serve` itself sustains: against a server in another process that only writes.

Figures are of a generator that one core has to itself; the server takes most of another one.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from typing import NamedTuple

import uvloop
from rich.console import Console

from bench.canned import Canned, Manner
from bench.report import Row, finish
from bench.serve.options import Options
from bench.serve.run import run

SECONDS = 5.0


async def _serve(gap_s: float) -> None:
    async with Canned(Manner(gap_s=gap_s)).serving() as url:
        print(url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class Load(NamedTuple):
    """``gap_s``: between one token of a stream and the next; 0: reads bring several at once."""

    streams: int
    output: int
    gap_s: float = 0.0


LOADS = (Load(32, 1), Load(64, 64), Load(256, 64, 0.01), Load(1000, 64, 0.05))


def measure(load: Load, seconds: float) -> list[Row]:
    child = [sys.executable, "-m", "bench.load_limit", "--server", str(load.gap_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(child, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        url = server.stdout.readline().strip()
        options = Options(
            url=url,
            concurrency=load.streams,
            duration_s=seconds,
            output=str(load.output),
            timeout_s=30.0,
        )
        found = uvloop.run(run(options, Console(stderr=True)))
        server.stdin.close()
    s = found.summary
    assert s.ok and not s.errors, s.errors
    per_s = s.output_tokens_per_s / (s.tokens_per_arrival or 1)
    name = f"{load.streams} streams of {load.output} tokens, {1e3 * load.gap_s:g} ms apart"
    return [
        Row(f"{name}: requests", s.achieved_rate, "/s"),
        Row(f"{name}: tokens", s.output_tokens_per_s, "/s"),
        Row(f"{name}: arrivals", per_s, "/s"),
        Row(f"{name}: processor", found.health.cpu_share, "cores"),
        Row(f"{name}: processor for an arrival", 1e6 * found.health.cpu_share / per_s, "us"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    o = parser.parse_args()
    if o.server is not None:
        uvloop.run(_serve(o.server))
        return
    rows = [row for load in LOADS for row in measure(load, o.seconds)]
    finish("load_limit", rows)


if __name__ == "__main__":
    main()
