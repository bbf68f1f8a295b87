"""Messages of a hostile decode worker to a router (router/workers, router/generation).

An output is taken, or ends its request; nothing of it reaches another request, and what the router
learns from it stays within sense.
"""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError

from protocol.registry.directory import WorkerRecord
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb
from router.generation.submission import (
    Submission,
    TokenBatch,
    TokenQueue,
    event_timeline,
    ttft_stages,
)
from router.placement.estimates import RoutingEstimates
from router.workers.decode_link import DecodeLink
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget
from tests.fuzz.targets.records import LIVE_WORKER
from tests.fuzz.virtual_loop import VirtualLoop

_WAITING = 64  # tokens that may wait for a client
_NAMES = ("plain", "scored")


def fuzz_one(data: bytes) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_serve(ByteReader(data)))
    finally:
        loop.close()
    assert not loop.errors, loop.errors[0]


class _Router:
    """A router with one link and two requests at the worker."""

    def __init__(self) -> None:
        record: WorkerRecord = LIVE_WORKER
        self.link = DecodeLink(record, "token", lambda: None, lambda *_: None)
        self.link.attached = True
        self.estimates = RoutingEstimates()
        scored = SamplingParams(logprobs=2, prompt_logprobs=2)
        self.queues = {name: TokenQueue(_WAITING) for name in _NAMES}
        self.submissions = {
            name: self._submit(name, SamplingParams() if name == "plain" else scored)
            for name in _NAMES
        }

    def _submit(self, name: str, sampling: SamplingParams) -> Submission:
        request = Request(id=name, prompt=(1, 2, 3), sampling=sampling)
        ticket = SimpleNamespace(on_tokens=lambda: None, release=lambda: None)
        placer: Any = SimpleNamespace(
            estimates=self.estimates,
            submit_message=lambda placed, request: pb.Submit(request=pb.Request(id=request.id)),
            open_ticket=lambda *_: ticket,
        )
        p = SimpleNamespace(instance="p", ttft_s=0.1)
        chosen = SimpleNamespace(prefill="p", decode="d", p=p)
        choice = SimpleNamespace(chosen=chosen, others=[])
        placed: Any = SimpleNamespace(link=self.link, choice=choice, neighbours=1)
        return Submission(placer, placed, request, self.queues[name])


async def _serve(reader: ByteReader) -> None:
    router = _Router()
    while reader.left:
        try:
            message = pb.WorkerMessage.FromString(reader.piece(4000))
        except DecodeError:
            continue
        router.link._dispatch(message)
        if message.HasField("load"):
            speculation = router.link.load().speculation
            assert speculation is None or speculation.is_valid
        for name in _NAMES:
            await _take(router, name)
    for submission in router.submissions.values():
        submission.release()
    assert router.link.idle
    _check_estimates(router.estimates)


async def _take(router: _Router, name: str) -> None:
    queue, submission = router.queues[name], router.submissions[name]
    batch: TokenBatch | None = None
    try:
        async with asyncio.timeout(1):
            batch = await queue.take()
    except TimeoutError:
        return
    assert len(batch.logprobs) == (len(batch.tokens) if name == "scored" else 0)
    assert len(queue.prompt_logprobs) in (0, 2 if name == "scored" else 0)
    if batch.tokens:
        submission.record_tokens()
    if batch.finish:
        submission.record_finish()
    _check_times(submission)


def _check_times(submission: Submission) -> None:
    stages = ttft_stages(submission.submitted, 0.2, [submission])
    times = [*event_timeline(submission.submitted, [submission]).values(), *stages.values()]
    assert all(math.isfinite(seconds) for seconds in times), "a time that is no number"
    assert all(seconds >= 0 for seconds in stages.values())


def _check_estimates(estimates: RoutingEstimates) -> None:
    assert 0 < estimates.kv_bytes(1000) <= 1 << 27
    assert 0.1 <= estimates.correction("p") <= 10
    network = estimates.network({})
    assert all(0 < rate <= 1e14 for rate in network.bandwidth.values())


TARGET = FuzzTarget(
    "worker_output", fuzz_one, Budget(base_s=0.2, s_per_byte=1e-4, bytes_per_byte=3000)
)
