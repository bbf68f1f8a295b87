"""What a worker, a directory or a burst may bring: nothing of it costs another request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import msgspec

from protocol.performance.step_model import StepModel, parse_step_model
from protocol.registry.directory import ModelInfo
from protocol.wire import wire_pb2 as pb
from router.generation.submission import TokenQueue
from router.placement.choose import choose_placement
from router.workers.decode_link import DecodeLink
from tests.router.conftest import Start, until
from tests.router.fake_worker import FakeWorker, expected, outputs
from tests.router.snapshots import GOALS, decode, network, prefill, query, snapshot
from tests.router.workers.test_workers import new_pool
from tests.router.workers.test_workers import prefill as prefill_record


def test_a_burst_is_cut_into_messages_that_grpc_takes(model_info: ModelInfo) -> None:
    record = msgspec.structs.replace(FakeWorker(outputs(), model_info).record, endpoint="x:1")
    link = DecodeLink(record, "token", lambda: None, lambda *_: None)
    link.attached = True
    sent = [str(i) for i in range(40)]
    for name in sent:
        request = pb.Request(id=name, prompt=[100_000] * 100_000)  # 300 kB
        link.submit(pb.Submit(request=request), TokenQueue(8))
    link.cancel("3")
    came: list[str] = []
    for _ in range(40):
        message = link._next_message()
        assert message.ByteSize() < 5 << 20
        came += [s.request.id for s in message.submit]
    assert came == [name for name in sent if name != "3"]


def test_no_step_model_makes_a_choice_fail() -> None:
    assert parse_step_model((1e308,) * 5) is None
    assert parse_step_model((float("nan"),) * 5) is None
    absurd = StepModel(*(1e308,) * 5)
    p, d = prefill("p"), decode("d")
    p, own = p._replace(model=absurd), d.own._replace(model=absurd)
    found = choose_placement(
        query(2000), snapshot([p], [d._replace(own=own)], network()), GOALS, Random(0)
    )
    assert found is not None and found.chosen.decode == "d"


async def test_an_unknown_finish_goes_to_another_attempt(start: Start) -> None:
    tries = 0

    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        nonlocal tries
        tries += 1
        if tries == 1:
            yield pb.Output(id=request.id, finish=7)  # type: ignore[arg-type]
        tokens = expected(request.prompt, request.sampling.max_tokens)
        yield pb.Output(id=request.id, tokens=tokens, finish=pb.FINISH_LENGTH)

    cluster = await start(script)
    assert (await cluster.post(prompt="hi", max_tokens=3)).status_code == 200
    assert tries == 2


async def test_cached_tokens_are_those_of_the_attempt_that_began(start: Start) -> None:
    """The next one finds what the first has computed: that was not cached for this request."""
    cluster = await start(outputs(error_after=2), outputs(cached=1))
    cluster.workers[0].script = outputs(error_after=2, cached=0)
    for worker in cluster.workers:
        if worker is not cluster.workers[0]:
            worker.script = outputs(cached=2)
    answer = (await cluster.post(prompt="hello there", max_tokens=6)).json()
    resumed = [s for w in cluster.workers for s in w.requests if s.request.emitted]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (0 if resumed else 2)


async def test_an_emptied_directory_costs_no_prefill_worker(start: Start) -> None:
    cluster = await start(outputs())
    pool = new_pool(cluster)
    cluster.prefill = [prefill_record("p0", cluster.model), prefill_record("p1", cluster.model)]
    await pool.refresh()
    cluster.prefill = []
    await pool.refresh()
    assert sorted(pool.prefill) == ["p0", "p1"]
    # Another instance on the same port is another matter, and so is one that stays away.
    cluster.prefill = [prefill_record("p2", cluster.model, endpoint="127.0.0.1:100")]
    await pool.refresh()
    assert sorted(pool.prefill) == ["p1", "p2"]
    pool._prefill_registry._seen["p1"] -= 10
    async with asyncio.timeout(5):  # nothing listens on its port
        while "p1" in pool.prefill:
            await asyncio.sleep(0.01)
            await pool.refresh()
    assert sorted(pool.prefill) == ["p2"]
    await pool.close()
    await until(lambda: pool.attached == 0)
