"""A decode worker without an engine: a real gRPC server that follows a script.

What it generates is a function of the prompt and the position only (``expected``), as the numerics
contract has it: so whoever resumes a request must come to the same text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from protocol.registry.directory import ModelInfo, WorkerRecord, new_instance_id
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.wire import wire_pb2 as pb
from protocol.wire.wire_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server

TOKEN = "test-token"

Script = Callable[[pb.Request], AsyncIterator[pb.Output]]


class Die(Exception):
    """Raised by a script: the worker's stream ends here, for all requests on it."""


def expected(prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
    """What a worker generates: the prompt again and again, from its ``choice``-th token on."""
    return [prompt[(i + choice) % len(prompt)] for i in range(count)]


def logprob_of(token: int) -> float:
    """What a worker says of a token: a number that has an exact representation."""
    return -(token % 32) / 32 - 0.5


def told(token: int, count: int, wanted: Sequence[int] = ()) -> pb.Logprobs:
    """The ``count`` tokens from this one on are the most likely ones, or it tells the ``wanted``
    ones after this one."""
    top = [(token + i) % 256 for i in range(count)]
    if wanted:
        top, count = [token, *wanted], 1 + len(wanted)
    return pb.Logprobs(
        logprob=logprob_of(token),
        rank=1,
        top_tokens=top,
        top_logprobs=[logprob_of(token) - i for i in range(count)],
    )


def outputs(
    *,
    delay: float = 0.0,
    die_after: int | None = None,
    error_after: int | None = None,
    retryable: bool = True,
    together: int = 1,
    cached: int = 0,
    moved: bool = False,
    deaths: int = 0,
) -> Script:
    """A script: the expected tokens, ``together`` in a message, with a fault after some tokens."""

    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        limit = request.sampling.max_tokens
        sampling = request.sampling
        tokens = expected(request.prompt, limit, sampling.choice)
        sent = 0
        for at in range(len(request.emitted), limit, together):
            if die_after == sent:
                raise Die
            if error_after == sent:
                if deaths:
                    yield pb.Output(id=request.id, deaths=deaths)
                last = pb.Output(id=request.id, finish=pb.FINISH_ERROR, error="boom")
                last.retryable, last.moved = retryable, moved
                yield last
                return
            await asyncio.sleep(delay)
            ids = tokens[at : at + together]
            sent += len(ids)
            finish = pb.FINISH_LENGTH if at + len(ids) == limit else pb.FINISH_NONE
            output = pb.Output(id=request.id, tokens=ids, finish=finish, cached_tokens=cached)
            if sampling.HasField("logprobs"):
                output.logprobs.extend(
                    told(token, sampling.logprobs, sampling.logprob_token_ids) for token in ids
                )
            if sampling.HasField("prompt_logprobs") and not at:
                count = sampling.prompt_logprobs
                output.prompt_logprobs.extend(told(token, count) for token in request.prompt[1:])
            yield output

    return script


def tokens_then_stop(ids: Sequence[int]) -> Script:
    """A script: these tokens in one message, then a stop."""

    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        output = pb.Output(id=request.id, tokens=ids, finish=pb.FINISH_STOP)
        if request.sampling.HasField("logprobs"):
            output.logprobs.extend(told(token, request.sampling.logprobs) for token in ids)
        yield output

    return script


def speaks(ids: Sequence[int], *, together: int = 1, stop: bool = True) -> Script:
    """A script: these tokens, ``together`` in a message."""

    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        last = pb.FINISH_STOP if stop else pb.FINISH_LENGTH
        for at in range(0, len(ids), together):
            await asyncio.sleep(0)
            part = ids[at : at + together]
            finish = last if at + together >= len(ids) else pb.FINISH_NONE
            output = pb.Output(id=request.id, tokens=part, finish=finish)
            if request.sampling.HasField("logprobs"):
                output.logprobs.extend(told(token, request.sampling.logprobs) for token in part)
            yield output

    return script


async def silent(request: pb.Request) -> AsyncIterator[pb.Output]:
    """A script: nothing ever comes."""
    await asyncio.Event().wait()
    yield pb.Output(id=request.id)


class FakeWorker(DecodeServicer):
    def __init__(self, script: Script, model: ModelInfo) -> None:
        self.script = script
        self.model = model
        self.instance = new_instance_id()
        self.port = 0
        self.requests: list[pb.Submit] = []
        self.cancelled: list[str] = []
        self.messages = 0
        self.streams = 0
        self.load = pb.Load(kv_tokens_free=100_000, kv_tokens_total=100_000)
        self.role = "decode"
        self.draining = False
        self.mute = asyncio.Event()  # set: nothing is sent, as if the process stood still
        self._open: set[_Stream] = set()
        self._server: grpc.aio.Server | None = None

    @property
    def record(self) -> WorkerRecord:
        endpoint = f"127.0.0.1:{self.port}"
        return WorkerRecord(
            instance=self.instance,
            role=self.role,
            home="decode",
            endpoint=endpoint,
            kv_endpoint=endpoint,
            model=self.model,
            pid=1,
            engine_pid=2,
            draining=self.draining,
        )

    async def start(self, token: str = TOKEN) -> None:
        self._server = grpc.aio.server(
            interceptors=[AsyncTokenGuard(token)],
            options=[
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            ],
        )
        add_DecodeServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def say_draining(self) -> None:
        """On the streams only: the directory does not know yet."""
        for stream in self._open:
            stream.outbox.put_nowait(pb.WorkerMessage(draining=True))

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        stream = _Stream(self, context)
        self.streams += 1
        self._open.add(stream)
        await context.send_initial_metadata(())
        stream.outbox.put_nowait(pb.WorkerMessage(load=self.load))
        loops = [
            asyncio.create_task(stream.read(request_iterator)),
            asyncio.create_task(stream.write()),
            asyncio.create_task(stream.beat()),
        ]
        try:
            await stream.dead.wait()
        finally:
            for task in (*loops, *stream.tasks.values()):
                task.cancel()
            self.streams -= 1
            self._open.discard(stream)


class _Stream:
    """One router's stream. A single task writes: gRPC takes no two writes at once."""

    def __init__(self, worker: FakeWorker, context: Any) -> None:
        self.dead = asyncio.Event()
        self.outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._worker = worker
        self._context = context
        self._dying = False

    async def read(self, messages: Any) -> None:
        async for message in messages:
            self._worker.messages += 1
            for submit in message.submit:
                self._worker.requests.append(submit)
                task = asyncio.create_task(self._run(submit.request))
                self.tasks[submit.request.id] = task
            for wire_id in message.cancel:
                self._worker.cancelled.append(wire_id)
                self.tasks[wire_id].cancel()
        self.dead.set()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.outbox.put_nowait(pb.WorkerMessage(load=self._worker.load))

    async def write(self) -> None:
        while True:
            message = await self.outbox.get()
            while self._worker.mute.is_set():
                await asyncio.sleep(0.01)
            while not self.outbox.empty():
                message.MergeFrom(self.outbox.get_nowait())
            await self._context.write(message)
            if self._dying and self.outbox.empty():
                self.dead.set()

    async def _run(self, request: pb.Request) -> None:
        try:
            async for output in self._worker.script(request):
                self.outbox.put_nowait(pb.WorkerMessage(outputs=[output]))
        except Die:
            # What was generated before still goes out.
            self._dying = True
            self.outbox.put_nowait(pb.WorkerMessage())


async def _main() -> None:
    """A worker in a process of its own: prints its port, then generates slowly."""
    model = ModelInfo(
        id="tiny",
        fingerprint="f" * 32,
        precision="exact",
        max_model_len=4096,
        vocab_size=256,
        kv_bytes_per_token=1024,
    )
    worker = FakeWorker(outputs(delay=0.01), model)
    await worker.start()
    print(worker.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
