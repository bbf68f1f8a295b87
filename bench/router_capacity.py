"""What one router bears: requests and tokens per second, and the processor time of each.

    python -m bench.router_capacity [--quick] [--routers N] [--beside PATH] [--profile]

Routers, fake decode workers (``bench.router.fake_decode``) and this client are processes. Workers
and client share one core, and the routers have the others, where there are several. The figures
"per core" are 1 divided by the processor time that the routers took, system time and threads
included: other programs of the machine change these less than what a clock shows.

``--routers N`` gives N routers N times the connections: where capacity is linear, the processor
time of a request stays. Routers that share a core get workers whose steps are longer by as much, so
that each finds as many tokens in a message as it would on a core of its own. ``--beside`` measures
the routers of another checkout by turns with these. ``--profile`` prints in which functions a
router spends its time instead; its figures are slower.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from bench.lib.report import ResultRow, finish, median
from bench.router.capacity_pool import HOST, RouterSet, capacity_pool
from bench.router.fake_decode import FIRST_ID, MODEL

HERE = Path(__file__).parents[1]
LOAD_S = 120.0

LONG_PROMPT = 128_000
WORDS = "Why does a worker that only decodes keep the answers of the others short and quick? "


class CapacityLoad(NamedTuple):
    """Requests of one kind, sent over connections that stay open."""

    name: str
    connections: int
    requests: int  # of each connection
    output: int  # tokens of an answer
    together: int  # tokens of a step
    stream: bool
    prompt: int = 0  # tokens; 0: a chat of some 80 characters
    unit: str = "requests"

    def body(self, number: int) -> bytes:
        """Return the body of a request; prompts differ by their number."""
        common = {
            "model": MODEL.id,
            "max_tokens": self.output,
            "seed": self.together,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.prompt:
            ids = [FIRST_ID + (number * 7 + i) % 3000 for i in range(self.prompt)]
            return msgspec.json.encode(common | {"prompt": ids})
        text = f"{number} {WORDS}"
        return msgspec.json.encode(common | {"messages": [{"role": "user", "content": text}]})

    def path(self) -> str:
        return "/v1/completions" if self.prompt else "/v1/chat/completions"

    @property
    def units(self) -> int:
        """Number of what is counted: requests or tokens, of all connections together."""
        each = self.output if self.unit == "tokens" else 1
        return self.connections * self.requests * each


LOADS = (
    CapacityLoad("short chat, whole", 32, 60, 8, 8, False),
    CapacityLoad("short chat, stream", 32, 60, 8, 4, True),
    CapacityLoad("256 streams, 1 token a step", 256, 1, 256, 1, True, unit="tokens"),
    CapacityLoad("256 streams, 4 tokens a step", 256, 1, 1024, 4, True, unit="tokens"),
    CapacityLoad(f"prompts of {LONG_PROMPT} tokens", 2, 8, 8, 8, False, LONG_PROMPT),
)


class LoadConnection(asyncio.Protocol):
    """One connection of the client: sends its requests one after another.

    Responses are only searched for their ends, so that the client takes little of its core.
    """

    def __init__(self, bodies: Sequence[bytes], load: CapacityLoad) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load = load
        self._waiting = list(reversed(bodies))
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._head = self._head or data[:12]
        self._tail = (self._tail if len(data) < 64 else b"")[-64:] + data
        end = b"data: [DONE]\n\n\r\n0\r\n\r\n" if self._load.stream else b"}"
        if self._head != b"HTTP/1.1 200":
            self._fail(f"a router answered {(self._head + data)!r}")
        elif self._tail.endswith(end):
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"a router closed a connection: {exc}")

    def _next(self) -> None:
        self._head = self._tail = b""
        if self._waiting:
            self._transport.write(self._waiting.pop())
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(reason))


async def send_load(load: CapacityLoad, ports: Sequence[int], first: int) -> float:
    """Send all requests of ``load``, numbered from ``first``; return the seconds that it took.
    Raises RuntimeError for a request that is not answered in full."""
    loop, connections = asyncio.get_running_loop(), []
    for index in range(load.connections):
        numbers = range(first + index * load.requests, first + (index + 1) * load.requests)
        bodies = [_request(load, number) for number in numbers]
        connections.append(LoadConnection(bodies, load))
    began = time.perf_counter()
    for index, connection in enumerate(connections):
        port = ports[index % len(ports)]
        await loop.create_connection(lambda made=connection: made, HOST, port)  # type: ignore[misc]
    async with asyncio.timeout(LOAD_S):
        await asyncio.gather(*(connection.done for connection in connections))
    return time.perf_counter() - began


def _request(load: CapacityLoad, number: int) -> bytes:
    body = load.body(number)
    head = (
        f"POST {load.path()} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class CapacityRound(NamedTuple):
    """What one round of a load took."""

    cpu_s: float  # of all routers, for each request or token
    seconds: float  # by the clock, likewise


def run_round(routers: RouterSet, load: CapacityLoad, number: int) -> CapacityRound:
    before = routers.cpu_s()
    seconds = uvloop.run(send_load(load, routers.ports, number * 1_000_000))
    return CapacityRound((routers.cpu_s() - before) / load.units, seconds / load.units)


def rows(load: CapacityLoad, found: Sequence[Sequence[CapacityRound]]) -> list[ResultRow]:
    """Make the rows of one load; ``found`` has the rounds of these routers, then the other's."""
    cpu = [median([one.cpu_s for one in rounds]) for rounds in found]
    shown = median([one.seconds for one in found[0]])
    against = f"beside {1e6 * cpu[1]:.1f} us" if len(cpu) > 1 else ""
    ratio = cpu[1] / cpu[0] if len(cpu) > 1 else None
    name = load.name
    return [
        ResultRow(f"{name}: processor time", 1e6 * cpu[0], f"us/{load.unit[:-1]}", against, ratio),
        ResultRow(f"{name}: per core", 1 / cpu[0], f"{load.unit}/s"),
        ResultRow(f"{name}: by the clock", 1 / shown, f"{load.unit}/s"),
    ]


def scaled(load: CapacityLoad, share: float) -> CapacityLoad:
    """Return ``load`` with fewer requests, or streams of fewer tokens."""
    if load.unit == "tokens":
        return load._replace(output=int(load.output * share), requests=1)
    return load._replace(requests=max(1, int(load.requests * share)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the load, one round")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="loads whose name contains this")
    options = parser.parse_args()
    loads = [
        load._replace(connections=load.connections * options.routers)
        for load in LOADS
        if options.only in load.name
    ]
    if options.quick:
        loads = [scaled(load, 0.25) for load in loads]
    sources = [HERE, *([options.beside.absolute()] if options.beside else [])]
    rounds = 1 if options.profile else 3
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile" if options.profile else None
        with capacity_pool(sources, options.routers, profile) as sets:
            result = _measure(loads, sets, rounds)
        if profile is not None:
            pstats.Stats(str(profile)).sort_stats("tottime").print_stats(40)
    finish("router_capacity", result)


def _measure(
    loads: Sequence[CapacityLoad], sets: Sequence[RouterSet], rounds: int
) -> list[ResultRow]:
    result: list[ResultRow] = []
    for load in loads:
        found: list[list[CapacityRound]] = [[] for _ in sets]
        for number in range(rounds + 1):  # the first warms up
            shown = scaled(load, 0.1) if number == 0 else load
            for routers, of_set in zip(sets, found, strict=True):
                one = run_round(routers, shown, number)
                if number:
                    of_set.append(one)
        result += rows(load, found)
    return result


if __name__ == "__main__":
    main()
