"""A client that sends completions at given times, or so many at once, and times their streams.

Times count from when a request was due, so that a client or a server that falls behind shows.

A client that competes with a router for a core measures its own wait as the router's, so a
benchmark of latencies may give it one:

    core = leave_client_core()    before the pool starts: its processes inherit all other cores
    take_client_core(core)        afterwards: this process has that core for itself
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import cycle, pairwise
from math import inf
from typing import Any, NamedTuple

import aiohttp
import msgspec

MODEL = "baton-demo"
KEEP_ALIVE_S = 2.0
"""Well below the server's: a connection that the server is just closing would fail a request."""

REFUSED = (429, 503)
REST_S = 0.5
"""The least a client of a closed loop waits when it was refused, before it sends again."""

_NICE = 10
LEAST_CORES = 4
"""Cores from which the client has one of them for itself."""


class Objective(NamedTuple):
    """The latencies that a request must meet to count as good."""

    ttft_s: float
    tpot_s: float


class Arrival(NamedTuple):
    """A request to send ``at`` seconds after the beginning."""

    at: float
    prompt: list[int]
    output: int


class StreamTiming(NamedTuple):
    """The answer to one request, in seconds after it was due.

    ``status`` is 0 when the answer broke off or never came. A gap is the time between two chunks
    of the stream; a chunk may bring several tokens.
    """

    at: float  # when it was due
    status: int
    ended_s: float
    ttft_s: float = inf
    tpot_s: float = inf
    gaps: tuple[float, ...] = ()
    prompt: int = 0  # tokens
    cached: int = 0  # tokens of the prompt
    predicted_s: float = 0.0  # the router's prediction of TTFT
    observed_s: float = 0.0  # TTFT at the router
    retry_after_s: float = 0.0  # what a refusal asks to wait

    def meets(self, goal: Objective) -> bool:
        return self.status == 200 and self.ttft_s <= goal.ttft_s and self.tpot_s <= goal.tpot_s


class ClosedLoop(NamedTuple):
    """The answers of a closed loop, and the seconds until the last one ended."""

    answers: list[StreamTiming]
    seconds: float

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return sum(a.status == 200 for a in self.answers) / self.seconds


class _Message(NamedTuple):
    """A request that is encoded beforehand, so that sending takes little of a shared processor."""

    at: float
    output: int
    body: bytes


def session(
    timeout_s: float = 60.0, *, explain: bool = False, api_key: str = ""
) -> aiohttp.ClientSession:
    """Open a client session; ``explain`` asks the router for its predictions with each answer."""
    headers = {"content-type": "application/json"} | ({"x-baton-explain": "1"} if explain else {})
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
    )


class LoadClient:
    """Sends greedy completions of token ids to the server at ``url``, or to several in turn.

    ``salt`` separates the prefix cache: nothing that another salt cached is found. ``explain``
    fills in ``predicted_s`` and ``observed_s``.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = MODEL,
        *,
        salt: str = "",
        explain: bool = False,
        timeout_s: float = 60.0,
        api_key: str = "",
    ) -> None:
        servers = [url] if isinstance(url, str) else url
        self._urls = cycle([f"{server}/v1/completions" for server in servers])
        self._model = model
        self._salt = salt
        self._explain = explain
        self._timeout_s = timeout_s
        self._api_key = api_key

    async def open_loop(self, arrivals: Sequence[Arrival]) -> list[StreamTiming]:
        """Send each request when it is due, and return all answers in the order of arrival."""
        messages = [self._encode(arrival) for arrival in arrivals]
        sent = []
        async with self._session() as http:
            began = time.perf_counter()
            for message in messages:
                due = began + message.at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                sent.append(asyncio.create_task(self._send(http, message, due)))
            return await asyncio.gather(*sent)

    async def closed_loop(
        self, arrivals: Sequence[Arrival], streams: int, seconds: float = inf
    ) -> ClosedLoop:
        """Keep ``streams`` requests under way, and send no new one after ``seconds``. A client that
        is refused waits as long as it is told to before it sends its next one."""
        waiting = [self._encode(arrival) for arrival in reversed(arrivals)]
        answers: list[StreamTiming] = []

        async def client(http: aiohttp.ClientSession) -> None:
            while waiting and time.perf_counter() - began < seconds:
                answer = await self._send(http, waiting.pop(), time.perf_counter())
                answers.append(answer)
                if answer.status in REFUSED:
                    left_s = began + seconds - time.perf_counter()
                    await asyncio.sleep(min(max(REST_S, answer.retry_after_s), max(0.0, left_s)))

        async with self._session() as http:
            began = time.perf_counter()
            await asyncio.gather(*(client(http) for _ in range(streams)))
            return ClosedLoop(answers, time.perf_counter() - began)

    def _session(self) -> aiohttp.ClientSession:
        return session(self._timeout_s, explain=self._explain, api_key=self._api_key)

    def _encode(self, arrival: Arrival) -> _Message:
        body = {
            "model": self._model,
            "prompt": arrival.prompt,
            "max_tokens": arrival.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self._salt:
            body["cache_salt"] = self._salt
        return _Message(arrival.at, arrival.output, msgspec.json.encode(body))

    async def _send(
        self, http: aiohttp.ClientSession, message: _Message, due: float
    ) -> StreamTiming:
        """``due``: on time.perf_counter."""
        chunks: list[float] = []
        tail: dict[str, Any] = {}
        status = 0
        try:
            async with http.post(next(self._urls), data=message.body) as response:
                if response.status != 200:
                    await response.read()
                    refusal = StreamTiming(message.at, response.status, time.perf_counter() - due)
                    return refusal._replace(retry_after_s=_retry_after_s(response))
                async for line in response.content:
                    if b'"token_ids":' in line:
                        chunks.append(time.perf_counter() - due)
                    elif line.startswith(b'data: {"error"'):
                        break
                    elif line.startswith(b"data: {"):
                        tail |= {k: v for k, v in msgspec.json.decode(line[6:]).items() if v}
                    elif line.startswith(b"data: [DONE]"):
                        status = 200
        except (aiohttp.ClientError, TimeoutError):
            pass
        ended = time.perf_counter() - due
        if status != 200:
            return StreamTiming(message.at, 0, ended)
        return self._timing(message, ended, chunks, tail)

    def _timing(
        self, message: _Message, ended: float, chunks: list[float], tail: dict[str, Any]
    ) -> StreamTiming:
        usage = tail["usage"]
        found = StreamTiming(
            message.at,
            200,
            ended,
            chunks[0],
            (chunks[-1] - chunks[0]) / max(1, message.output - 1),
            tuple(b - a for a, b in pairwise(chunks)),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )
        if not self._explain:
            return found
        attempt = tail["baton"]["attempts"][0]
        predicted = attempt["chosen"]["predicted"]["ttft_s"]
        return found._replace(predicted_s=predicted, observed_s=attempt["observed"]["ttft_s"] or 0)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Return the whole seconds that the answer asks to wait; 0 where it names none."""
    found = response.headers.get("retry-after", "")
    return float(found) if found.isdecimal() else 0.0


def leave_client_core() -> int | None:
    """Confine this process, and so all that it starts, to all cores but one; return that one.

    Returns None where there are fewer than ``LEAST_CORES``, and changes nothing then: engines that
    share a core slow each other more than the client does."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < LEAST_CORES:
        return None
    os.sched_setaffinity(0, cores[:-1])
    return cores[-1]


def take_client_core(core: int | None) -> str:
    """Move this process to the core that ``leave_client_core`` has left; return a description.
    Without one it takes a lower priority instead, so that the pool never waits for it."""
    if core is None:
        os.nice(_NICE)
        return f"the client shares the cores of the pool, at nice {_NICE}"
    os.sched_setaffinity(0, [core])
    return f"the client has core {core} for itself, the pool has the others"
