"""Real workers with real engines, and a client that speaks the router's side of Decode.Attach."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from bench.lib.settings import NO_SPECULATION, worker_settings
from cluster.local.redis_server import EmbeddedRedis
from cluster.settings.worker_settings import WorkerSettings
from cluster.worker.worker import Worker
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity
from protocol.requests import Request, request_to_wire
from protocol.roles import Role
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

TOKEN = "t" * 32


def settings(role: Role, redis: EmbeddedRedis, model: Path, **changes: Any) -> WorkerSettings:
    return worker_settings(
        role,
        **{
            "cluster": "test",
            "redis_url": redis.url,
            "token": TOKEN,
            "model_path": str(model),
            "model_id": "tiny",
            "threads": 1,
            "kv_tokens": 4096,
            "max_batch": 16,
            "prefill_chunk": 64,
            "kv_precision": "exact",
            "speculation": NO_SPECULATION,  # what it costs takes a second to measure
            **changes,
        },
    )


@contextlib.asynccontextmanager
async def running(
    *wanted: WorkerSettings, prepare: Callable[[Worker], Worker] = lambda worker: worker
) -> AsyncIterator[list[Worker]]:
    """``prepare`` is called with each worker before it starts."""
    workers = [prepare(Worker(s)) for s in wanted]
    try:
        await asyncio.gather(*(w.start() for w in workers))
        yield workers
    finally:
        await asyncio.gather(*(w.stop() for w in workers))


class Answer:
    """What came back for one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[pb.Logprobs] = []
        self.prompt_logprobs: list[pb.Logprobs] = []
        self.invalid: pb.Invalid | None = None
        self.finish = pb.FINISH_NONE
        self.error = ""
        self.retryable = self.moved = False
        self.deaths = 0
        self.cached = 0
        self.timeline: dict[str, float] = {}
        self.measured: pb.Measured | None = None
        self.first = asyncio.Event()
        self.ended = asyncio.Event()

    def take(self, output: pb.Output) -> None:
        assert not self.ended.is_set(), "an output after the last one"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.deaths += output.deaths
        self.cached = max(self.cached, output.cached_tokens)
        if output.tokens:
            self.first.set()
        if output.finish:
            self.finish, self.error = output.finish, output.error
            self.retryable, self.moved = output.retryable, output.moved
            self.invalid = output.invalid if output.HasField("invalid") else None
            self.timeline = {mark.event: mark.seconds for mark in output.timeline}
            self.measured = output.measured if output.HasField("measured") else None
            self.ended.set()


class Client:
    """One router's stream to one decode worker."""

    def __init__(
        self,
        decode: Worker,
        prefill: Iterable[Worker] = (),
        security: EndpointSecurity = LOOPBACK_ONLY,
    ) -> None:
        self.candidates = [candidate(w) for w in prefill]
        self.fetch: pb.Fetch | None = None
        self.answers: dict[str, Answer] = {}
        self.load = pb.Load()
        self.local_prefill_tokens = 8
        self.draining = False
        self._names = itertools.count()
        self._channel = security.async_channel(decode.record().endpoint)
        self._call = rpc.DecodeStub(self._channel).Attach(
            metadata=cluster_token.token_metadata(TOKEN)
        )
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            if message.HasField("load"):
                self.load = message.load
            self.draining |= message.draining
            for output in message.outputs:
                self.answers[output.id].take(output)

    async def submit(self, request: Request, deaths: int = 0) -> Answer:
        self.answers[request.id] = answer = Answer()
        submit = pb.Submit(
            request=request_to_wire(request),
            prefill=self.candidates,
            fetch=self.fetch,
            deaths=deaths,
            local_prefill_tokens=self.local_prefill_tokens,
        )
        async with self._writing:
            await self._call.write(pb.RouterMessage(submit=[submit]))
        return answer

    async def cancel(self, name: str) -> None:
        async with self._writing:
            await self._call.write(pb.RouterMessage(cancel=[name]))

    async def ask(self, request: Request, wait_s: float = 30.0) -> Answer:
        answer = await self.submit(request)
        async with asyncio.timeout(wait_s):
            await answer.ended.wait()
        return answer

    async def close(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._channel.close()


def candidate(worker: Worker) -> pb.PrefillCandidate:
    record = worker.record()
    return pb.PrefillCandidate(
        instance=record.instance, endpoint=record.endpoint, kv_endpoint=record.kv_endpoint
    )


@contextlib.asynccontextmanager
async def attached(
    decode: Worker, *prefill: Worker, security: EndpointSecurity = LOOPBACK_ONLY
) -> AsyncIterator[Client]:
    client = Client(decode, prefill, security)
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def free_again(worker: Worker, within_s: float = 2.0) -> None:
    """Wait until every page of the worker is free or evictable."""
    async with asyncio.timeout(within_s):
        while worker.record().kv_tokens_free != worker.record().kv_tokens_total:
            await asyncio.sleep(0.05)
