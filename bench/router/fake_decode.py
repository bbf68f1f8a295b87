"""Decode workers without engines, in one process: what ``bench.router_capacity`` puts behind a
router.

Each serves ``Decode.Attach`` and is registered in Redis, with as many prefill workers that are
records only. At every step all sequences of a worker get their next tokens, and the outputs of a
step are one message, as those of a real worker are. A request's seed is the number of tokens that a
step brings it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import grpc.aio
import uvloop

from protocol.performance.step_model import StepModel
from protocol.registry.directory import Directory, ModelInfo, WorkerRecord, new_instance_id
from protocol.registry.leases import LeaseRenewer
from protocol.registry.redis_client import connect
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.wire import wire_pb2 as pb
from protocol.wire.wire_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server

CLUSTER = "default"
BEAT_S = 0.5
KV_TOKENS = 1 << 26
STEP_MODEL = StepModel(2e-4, 1e-6, 1e-10, 1e-7, 0.0)
"""Quick enough that no request is refused."""

MAX_MODEL_LEN = 1 << 18
FIRST_ID, WORDS = 300, 2000
"""Token ids that the workers draw from, all of them text in the demo model's vocabulary."""

MODEL = ModelInfo(
    id="baton-demo",
    fingerprint="f" * 32,
    precision="exact",
    max_model_len=MAX_MODEL_LEN,
    vocab_size=4096,
    kv_bytes_per_token=1024,
)


def output_tokens(request: pb.Request) -> Iterator[int]:
    """Yield the tokens of a request: as many as it asks for, from a place of its own. The prompt is
    not looked at, because an older router may send it in another field."""
    first = sum(request.id.encode())
    return (FIRST_ID + (first + i) % WORDS for i in range(request.sampling.max_tokens))


class FakeSequence:
    """One request that is generated."""

    def __init__(self, request: pb.Request) -> None:
        self._id = request.id
        self._together = max(1, request.sampling.seed)
        self._left = request.sampling.max_tokens
        self._tokens = output_tokens(request)

    def step(self) -> pb.Output:
        self._left -= self._together
        finish = pb.FINISH_LENGTH if self._left <= 0 else pb.FINISH_NONE
        return pb.Output(id=self._id, tokens=islice(self._tokens, self._together), finish=finish)


class FakeDecodeWorker(DecodeServicer):
    """One decode worker that any number of routers attach to."""

    def __init__(self, step_s: float) -> None:
        self.instance = new_instance_id()
        self.port = 0
        self._step_s = step_s
        self._beat_steps = max(1, round(BEAT_S / step_s))

    async def start(self, token: str) -> grpc.aio.Server:
        """Listen at a free port; return the server, which the caller keeps."""
        server = grpc.aio.server(
            interceptors=[AsyncTokenGuard(token)], options=[("grpc.so_reuseport", 0)]
        )
        add_DecodeServicer_to_server(self, server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: Any
    ) -> AsyncIterator[pb.WorkerMessage]:
        sequences: dict[str, FakeSequence] = {}
        reading = asyncio.create_task(_read(request_iterator, sequences))
        loop = asyncio.get_running_loop()
        due, number = loop.time(), 0
        try:
            while not reading.done():
                message = _step(sequences)
                if number % self._beat_steps == 0:
                    message.load.CopyFrom(_load(len(sequences)))
                if message.outputs or message.HasField("load"):
                    yield message
                number += 1
                due = max(due + self._step_s, loop.time())
                await asyncio.sleep(due - loop.time())
        finally:
            reading.cancel()


async def _read(
    messages: AsyncIterator[pb.RouterMessage], sequences: dict[str, FakeSequence]
) -> None:
    async for message in messages:
        for submit in message.submit:
            sequences[submit.request.id] = FakeSequence(submit.request)
        for wire_id in message.cancel:
            sequences.pop(wire_id, None)


def _step(sequences: dict[str, FakeSequence]) -> pb.WorkerMessage:
    """Return the next tokens of all sequences, and forget those that end."""
    message = pb.WorkerMessage(outputs=[s.step() for s in sequences.values()])
    for output in message.outputs:
        if output.finish:
            del sequences[output.id]
    return message


def _load(running: int) -> pb.Load:
    return pb.Load(
        running=running,
        kv_tokens_free=KV_TOKENS,
        kv_tokens_total=KV_TOKENS,
    )


def worker_record(role: str, instance: str, port: int) -> WorkerRecord:
    endpoint = f"127.0.0.1:{port}"
    return WorkerRecord(
        instance=instance,
        role=role,
        endpoint=endpoint,
        kv_endpoint=endpoint,
        model=MODEL,
        pid=os.getpid(),
        engine_pid=os.getpid(),
        kv_tokens_free=KV_TOKENS,
        kv_tokens_total=KV_TOKENS,
        step_model=tuple(STEP_MODEL),
        max_batch=256,
        prefill_chunk=2048,
    )


async def serve(count: int, step_s: float) -> None:
    """Run ``count`` decode workers with steps of ``step_s`` seconds, and as many records of prefill
    workers, until the end."""
    directory = Directory(connect(os.environ["BATON_REDIS_URL"]), CLUSTER)
    kept: list[object] = []
    for _ in range(count):
        worker = FakeDecodeWorker(step_s)
        kept.append(await worker.start(os.environ["BATON_TOKEN"]))
        for role, instance in (("decode", worker.instance), ("prefill", new_instance_id())):
            record = worker_record(role, instance, worker.port)
            renewer = LeaseRenewer(directory.workers, lambda record=record: record)  # type: ignore[misc]
            await renewer.start()
            kept.append(renewer)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
