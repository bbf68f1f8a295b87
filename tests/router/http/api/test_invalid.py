"""What only a worker finds wrong with a request is the caller's to mend: 400, with the field."""

from __future__ import annotations

from collections.abc import AsyncIterator

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import Start


async def test_a_request_that_a_worker_finds_wrong_is_refused(start: Start) -> None:
    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        what = pb.Invalid(param="prompt", code="context_length_exceeded")
        why = "the pool holds 320 tokens"
        yield pb.Output(id=request.id, finish=pb.FINISH_ERROR, error=why, invalid=what)

    cluster = await start(script)
    answer = await cluster.post(prompt="hello", max_tokens=3)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "the pool holds 320 tokens",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    assert [len(worker.requests) for worker in cluster.workers] == [1], "nobody else is asked"
