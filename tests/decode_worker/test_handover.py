"""One hand-over: when it reserves pages, what it waits for, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker import handover as module
from decode_worker.handover import Handover
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from kvtransfer.prefill_call import guarded_by
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import CarrierFailed, NoPages, PeerRefused, TransferFailed
from protocol.page_reservation import MARGIN_S, TRUSTED_SHARE
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb

CHUNK = 100
TOKENS = 1000
LINK_BYTES_S = 1e9


class FakeInbound:
    """The KV side. ``run`` ends when the test says so."""

    codec = Codec.RAW
    link_bytes_s: float | None = LINK_BYTES_S

    def __init__(self) -> None:
        self.bytes = 0
        self.frames = 0
        self.runs: list[float] = []
        self.measured = False
        self.failures = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, frame_s: float) -> None:
        self.runs.append(frame_s)
        await self.done

    @contextlib.contextmanager
    def waiting_alone(self) -> Iterator[None]:
        assert self.runs, "the link is measured while this worker has no pages"
        self.measured = True
        yield

    def count_failure(self) -> None:
        self.failures += 1


class FakeCall:
    """Takes the place of ``PrefillRunCall``; the test puts in the events."""

    def __init__(self, context: Any, stream: Any, mark: Callable[[str], None]) -> None:
        self.on_computed: Callable[[int], None] = lambda tokens: None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()
        self.inbound = FakeInbound()
        context.calls.append(self)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TransferFailed("prefill: no progress within the deadline") from error

    async def start(self, *args: Any, **options: Any) -> None:
        self.started_with = args

    def inbound_transfer(self, handle: int, first_block: int, end_block: int) -> FakeInbound:
        self.first_block = first_block
        return self.inbound

    async def guard(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await guarded_by(self.over, work)

    async def next_event(self, kind: str) -> pb.PrefillEvent:
        event: pb.PrefillEvent = await self.guard(self.events.get())
        assert event.WhichOneof("body") == kind
        return event


class World:
    """A hand-over of ``tokens`` tokens in the body of ``open``; ``cached``: what the look-up finds,
    None: it goes on until the test sets the result."""

    def __init__(self, tokens: int = TOKENS, cached: int | None = 0) -> None:
        kv = SimpleNamespace(layers=1, block_layer_bytes=lambda codec: 1_000_000)
        ready = SimpleNamespace(prefill_chunk=CHUNK, vocab_size=320, step_seconds=0.01, kv=kv)
        self.sent: list[m.Command] = []
        session = SimpleNamespace(ready=ready, send=self.sent.append)
        self.calls: list[FakeCall] = []
        context: Any = SimpleNamespace(session=session, calls=self.calls)
        stream: Any = SimpleNamespace(cancel=lambda: None)
        candidate = pb.PrefillCandidate(instance="p", endpoint="p:1")
        request = Request(
            id="a", prompt=tuple(range(tokens)), sampling=SamplingParams(max_tokens=9),
            cache_root=bytes(16),
        )  # fmt: skip
        self.cached: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if cached is not None:
            self.cached.set_result(cached)
        self.handover = Handover(
            *(context, stream, candidate, 1, request, self._look_up, lambda event: None)
        )
        self.call = self.calls[0]
        self.inbound = self.call.inbound
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> pb.Measured:
        async with self.handover.open():
            await self.handover.first_token()
            self.first.set()
            return await self.handover.remaining_kv()

    async def _look_up(self) -> int:
        return await self.cached

    def has_asked(self) -> bool:
        return m.Reserve(1) in self.sent

    async def started(self, cached_tokens: int = 0) -> None:
        started = pb.PrefillEvent.Started(cached_tokens=cached_tokens)
        await self.event(pb.PrefillEvent(started=started))

    async def first_token(self, finish: int = 0) -> None:
        first = pb.PrefillEvent.FirstToken(token=7, finish=finish)  # type: ignore[arg-type]
        await self.event(pb.PrefillEvent(first_token=first))

    async def event(self, event: pb.PrefillEvent) -> None:
        self.call.events.put_nowait(event)
        await settle()

    async def computed(self, tokens: int, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        self.call.on_computed(tokens)
        await settle()


@pytest.fixture(autouse=True)
def fake_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PrefillRunCall", FakeCall)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_short_prompt_reserves_when_its_prefill_starts() -> None:
    world = World(tokens=2 * CHUNK)
    await world.started()
    assert world.has_asked() and not world.inbound.runs
    world.handover.pages_reserved.set()
    await settle()
    assert world.inbound.runs == [module.FRAME_S]
    world.task.cancel()


async def test_first_token_does_not_wait_for_the_look_up_here() -> None:
    world = World(tokens=2 * CHUNK, cached=None)
    await world.started()
    await world.first_token()
    assert world.first.is_set() and not world.has_asked()
    world.cached.set_result(70)
    await settle()
    assert world.call.first_block == 70 // BLOCK_TOKENS and world.has_asked()
    world.task.cancel()


async def test_look_up_may_end_the_handover() -> None:
    for after_first_token in (False, True):
        world = World(cached=None)
        await world.started()
        if after_first_token:
            await world.first_token()
        world.cached.set_exception(KeyError("enough is cached here"))
        with pytest.raises(KeyError):
            await asyncio.wait_for(world.task, 5)
        assert not world.has_asked()


async def test_what_is_cached_on_the_prefill_worker_makes_a_prompt_short() -> None:
    world = World()
    await world.started(cached_tokens=TOKENS - CHUNK)
    assert world.has_asked()
    world.task.cancel()


async def test_long_prompt_reserves_when_its_kv_is_about_to_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1000 tokens at 100 in 20 s; 32 blocks of KV take 32 s, and a reservation 0.01 s."""
    now, delays = 0.0, list[float]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module._PageTimer, "set_in", lambda timer, s: delays.append(s))
    monkeypatch.setattr(FakeInbound, "link_bytes_s", 1e6)
    world = World()
    await world.started()
    for done in (100, 200, 500, 900):
        now = done / 5
        await world.computed(done)
    lead_s = 32 + 0.01 + MARGIN_S
    assert delays[:3] == pytest.approx(
        [TRUSTED_SHARE * left_s - lead_s for left_s in (180, 160, 100)]
    )
    assert delays[3] == 0.0
    world.task.cancel()


async def test_pages_are_asked_for_when_their_time_has_come_though_nothing_else_happens() -> None:
    world = World()
    await world.started()
    await world.computed(TOKENS // 2, after_s=0.2)  # 0.13 s are left until KV has to flow
    assert not world.has_asked()
    async with asyncio.timeout(5):
        while not world.has_asked():
            await asyncio.sleep(0.01)
    world.task.cancel()


async def test_unknown_link_reserves_after_the_first_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeInbound, "link_bytes_s", None)
    world = World()
    await world.started()
    assert not world.has_asked()
    await world.computed(CHUNK, after_s=0.01)
    await asyncio.sleep(0.001)
    assert world.has_asked()
    world.task.cancel()


async def test_first_token_reserves_at_the_latest() -> None:
    world = World()
    await world.started()
    await world.first_token()
    assert world.has_asked() and world.first.is_set()
    world.task.cancel()


async def test_single_token_reserves_nothing() -> None:
    world = World()
    await world.started()
    await world.first_token(finish=pb.FINISH_LENGTH)
    assert not world.has_asked()
    world.task.cancel()


async def test_wait_for_pages_ends_and_is_no_part_of_what_the_link_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.started()
    await world.first_token()
    await asyncio.sleep(0.2)  # the pool is full
    assert not world.inbound.measured
    world.handover.pages_reserved.set()
    await settle()
    world.inbound.bytes = 5000
    world.inbound.done.set_result(None)
    measured = await world.task
    assert measured.tail_bytes == 5000 and measured.tail_seconds < 0.1

    monkeypatch.setattr(module, "PAGES_S", 0.05)
    world = World()
    await world.started()
    await world.first_token()
    with pytest.raises(NoPages, match="no pages free here within"):
        await asyncio.wait_for(world.task, 5)


async def test_death_of_the_prefill_worker_ends_the_wait_for_pages() -> None:
    world = World()
    await world.started()
    await world.first_token()
    world.call.over.set_exception(TransferFailed("prefill: the call ended"))
    with pytest.raises(TransferFailed, match="the call ended"):
        await asyncio.wait_for(world.task, 5)


async def test_failed_link_ends_the_wait_for_the_first_token() -> None:
    world = World(tokens=CHUNK)
    await world.started()
    world.handover.pages_reserved.set()
    await settle()
    world.inbound.done.set_exception(CarrierFailed("tcp: no KV frame for 5 s"))
    with pytest.raises(CarrierFailed):
        await asyncio.wait_for(world.task, 5)
    assert world.inbound.failures == 1


async def test_wait_for_a_turn_at_the_prefill_worker_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PREFILL_S", 0.05)
    world = World()
    with pytest.raises(PeerRefused, match="no first token within"):  # another worker is asked
        await asyncio.wait_for(world.task, 5)
    assert not world.has_asked()


@pytest.mark.parametrize("token, finish", [(320, 0), (7, 3)])
async def test_first_token_that_no_worker_draws_is_refused(token: int, finish: int) -> None:
    world = World()
    await world.started()
    first = pb.PrefillEvent.FirstToken(token=token, finish=finish)  # type: ignore[arg-type]
    await world.event(pb.PrefillEvent(first_token=first))
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(world.task, 5)
