"""What a request does after a failed hand-over: whom it asks again, and with which age."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker import request as module
from decode_worker.handover import FirstToken
from decode_worker.request import DecodeRequest
from engine.ipc import messages as m
from protocol.errors import CarrierFailed, NoPages, PeerLost, PeerRefused, TransferFailed
from protocol.requests import Finish, Request
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb

PROMPT = tuple(range(200))


class World:
    """An engine that answers look-ups, links, and hand-overs that end as ``outcomes`` say; the
    last one stays open."""

    def __init__(self, outcomes: list[TransferFailed]) -> None:
        self.outcomes = outcomes
        self.asked: list[tuple[str, Request]] = []  # (worker, request) of each hand-over
        self.sent: list[m.Command] = []
        self.outputs: list[pb.Output] = []
        self.unusable: set[str] = set()
        self.suspected: set[str] = set()
        self.handovers: list[FakeHandover] = []
        self.cached = 0
        self.waits_s: list[float] = []  # how long the request would wait for an engine
        self._handles = 0
        self._listeners: dict[int, Any] = {}
        ready = SimpleNamespace(prefill_chunk=64)
        self.session = SimpleNamespace(
            ready=ready,
            alive=True,
            attach=self._listeners.__setitem__,
            detach=lambda handle: self._listeners.pop(handle, None),
            send=self._send,
            send_prompt=self._send,
        )
        stream = SimpleNamespace(cancel=lambda: None)
        channels = SimpleNamespace(
            is_suspected=self.suspected.__contains__,
            suspect=self.suspected.add,
            open_call=lambda endpoint: stream,
        )
        links = SimpleNamespace(usable=lambda instance: instance not in self.unusable)
        context = SimpleNamespace(session=self.session, channels=channels, links=links)
        self.receiver: Any = SimpleNamespace(context=lambda: context)
        self.engine: Any = SimpleNamespace(session=self._session, handle=self._handle)

    async def _session(self, wait_s: float) -> Any:
        self.waits_s.append(wait_s)
        return self.session

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def _send(self, command: m.Command) -> None:
        self.sent.append(command)
        if isinstance(command, m.Receive):
            self.event(m.PrefixFound(command.handle, self.cached))

    def event(self, event: Any) -> None:
        self._listeners[event.handle].on_event(event)

    @property
    def local(self) -> list[m.Generate]:
        return [command for command in self.sent if isinstance(command, m.Generate)]


class FakeHandover:
    """Takes the place of ``Handover``."""

    world: World

    def __init__(
        self,
        context: Any,
        stream: Any,
        candidate: pb.PrefillCandidate,
        handle: int,
        request: Request,
        look_up: Callable[[], Awaitable[int]],
        mark: Callable[[str], None],
    ) -> None:
        self.world.asked.append((candidate.instance, request))
        self.world.handovers.append(self)
        self.pages_reserved = asyncio.Event()
        self.slots_read: list[int] = []
        self.refused: list[m.ReceiveFailed] = []
        self.received = asyncio.Event()
        self.frames = 5
        self.handle = handle
        self._look_up = look_up

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield

    async def first_token(self) -> FirstToken:
        await self._look_up()
        if self.world.outcomes:
            raise self.world.outcomes.pop(0)
        return FirstToken(7, Finish.NONE, None, [], 0)

    async def remaining_kv(self) -> pb.Measured:
        await self.received.wait()
        return pb.Measured()

    def on_slot_read(self, sequence: int) -> None:
        self.slots_read.append(sequence)

    def on_receive_failed(self, event: m.ReceiveFailed) -> None:
        self.refused.append(event)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Return a function that makes a world and one request in it, after fields of both are set."""

    def begin(
        *outcomes: TransferFailed,
        waited_s: float = 0.0,
        deadlines: tuple[float, float] = (0.0, 0.0),  # of the first token, and of each later one
        deaths: int = 0,
        has_alternative: bool = False,
        **fields: Any,
    ) -> World:
        world = World(list(outcomes))
        for name, value in fields.items():
            getattr(world, name).update(value)
        FakeHandover.world = world
        monkeypatch.setattr(module, "Handover", FakeHandover)
        submit = pb.Submit(
            prefill=[pb.PrefillCandidate(instance=n, endpoint=n) for n in ("p", "q", "r")],
            local_prefill_tokens=8,
            deaths=deaths,
            has_alternative=has_alternative,
        )
        request = Request(
            id="a", prompt=PROMPT, sampling=SamplingParams(max_tokens=9), cache_root=bytes(16),
            waited_s=waited_s, first_token_s=deadlines[0], token_timeout_s=deadlines[1],
        )  # fmt: skip
        world.request = DecodeRequest(  # type: ignore[attr-defined]
            request,
            submit,
            world.engine,
            world.receiver,
            world.outputs.append,
            lambda _: None,
        )
        return world

    return begin


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_same_worker_is_asked_again_and_then_the_prompt_is_prefilled_here(
    place: Callable[..., World],
) -> None:
    world = place(CarrierFailed("c"), NoPages("n"), TransferFailed("t"))
    await settle()
    assert [name for name, _ in world.asked] == ["p", "p", "p"]
    assert len(world.local) == 1
    drops = [command.handle for command in world.sent if isinstance(command, m.Drop)]
    assert drops == [1, 2, 3]  # each attempt has given back its pages


async def test_worker_that_refuses_or_dies_is_not_asked_again(place: Callable[..., World]) -> None:
    world = place(PeerRefused("draining"), PeerLost("dead", at_work=True))
    await settle()
    assert [name for name, _ in world.asked] == ["p", "q", "r"]
    assert world.suspected == {"q"}
    assert [output.deaths for output in world.outputs if output.deaths] == [1]


async def test_worker_without_a_usable_link_is_passed_over(place: Callable[..., World]) -> None:
    world = place(unusable={"p"}, suspected={"q"})
    await settle()
    assert [name for name, _ in world.asked] == ["r"]
    world = place(unusable={"p", "q", "r"})
    await settle()
    assert not world.asked and len(world.local) == 1


async def test_every_attempt_says_how_long_the_request_has_waited(
    place: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    world = place(*[TransferFailed("t")] * 3, waited_s=50.0)  # it came from another worker
    await settle()
    ages = [request.waited_s for _, request in world.asked] + [world.local[0].request.waited_s]
    assert ages == sorted(set(ages)) and ages[0] > 50
    looked_up = [c.request.waited_s for c in world.sent if isinstance(c, m.Receive)]
    assert looked_up == ages[:3]
    assert now - 100 > ages[-1] - 50 > 0


async def test_kv_that_fails_after_the_first_token_is_brought_again_from_the_same_worker(
    place: Callable[..., World],
) -> None:
    world = place()
    await settle()
    assert [list(output.tokens) for output in world.outputs] == [[7]]
    failed = m.ReceiveFailed(1, "arena 1 is not mapped", by_carrier=True)
    world.event(failed)
    assert world.handovers[0].refused == [failed]  # its link is avoided
    await settle()
    assert [name for name, _ in world.asked] == ["p", "p"]
    assert world.asked[1][1].emitted == (7,)


async def test_engine_hears_of_the_frames_and_the_transfer_of_slots_that_were_read(
    place: Callable[..., World],
) -> None:
    world = place()
    await settle()
    world.event(m.SlotRead(1, 3))
    assert world.handovers[0].slots_read == [3]
    world.handovers[0].received.set()
    await settle()
    assert world.sent[-1] == m.Join(1, 7, 5)


async def test_pages_are_promised_until_they_are_reserved(place: Callable[..., World]) -> None:
    world = place()
    request: DecodeRequest = world.request  # type: ignore[attr-defined]
    world.cached = 64
    await settle()
    assert request.promised_tokens == 200 - 64
    world.event(m.Reserved(1))
    assert world.handovers[0].pages_reserved.is_set()
    assert request.promised_tokens == 0
    world.event(m.ReceiveFailed(1, "evicted"))
    await settle()
    assert request.promised_tokens == 201 - 64  # again, with the first token
    request.cancel()
    assert request.promised_tokens == 0


async def test_prompt_that_is_prefilled_here_is_promised_until_it_starts(
    place: Callable[..., World],
) -> None:
    world = place(unusable={"p", "q", "r"})
    request: DecodeRequest = world.request  # type: ignore[attr-defined]
    await settle()
    assert request.promised_tokens == 200
    world.event(m.Started(1, 0))
    assert request.promised_tokens == 0


# ---- deaths and deadlines -------------------------------------------------------------------


def errors(world: World) -> list[pb.Output]:
    return [output for output in world.outputs if output.finish == pb.FINISH_ERROR]


async def test_request_that_kills_three_workers_in_a_row_ends(place: Callable[..., World]) -> None:
    world = place(*[PeerLost("dead", at_work=True)] * 3)
    await settle()
    [last] = errors(world)
    assert (last.retryable, last.error) == (False, "3 workers died while they served this request")
    assert not world.local


async def test_deaths_at_other_decode_workers_count(place: Callable[..., World]) -> None:
    world = place(PeerLost("dead", at_work=True), deaths=2)
    await settle()
    assert [output.retryable for output in errors(world)] == [False]


@pytest.mark.parametrize("has_alternative", [True, False])
async def test_only_who_can_go_nowhere_else_waits_for_an_engine(
    place: Callable[..., World], has_alternative: bool
) -> None:
    world = place(has_alternative=has_alternative)
    await settle()
    assert set(world.waits_s) == {0.0 if has_alternative else module.ENGINE_WAIT_S}


async def test_deaths_that_lie_apart_end_no_request(
    place: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 30.0  # several times between two attempts
        return now

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    world = place(*[PeerLost("dead", at_work=True)] * 3)
    await settle()
    assert not errors(world) and len(world.local) == 1


def hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no prefill worker ever send a first token."""

    async def first_token(self: FakeHandover) -> FirstToken:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(FakeHandover, "first_token", first_token)


async def test_request_ends_here_when_its_deadline_passes(
    place: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(monkeypatch)
    world = place(deadlines=(0.02, 60.0))
    await settle()
    assert world.asked and not errors(world)
    await asyncio.sleep(0.03)
    [last] = errors(world)
    assert last.expired and not last.retryable and "within 0.02 s" in last.error
    assert [c.handle for c in world.sent if isinstance(c, m.Drop)] == [1]
    placing = world.request._placing  # type: ignore[attr-defined]
    assert placing.cancelling(), "with which Prefill.Run ends"


async def test_deadline_of_the_first_token_is_over_with_it(place: Callable[..., World]) -> None:
    world = place(deadlines=(0.02, 60.0))
    await settle()
    assert [list(output.tokens) for output in world.outputs] == [[7]]
    world.event(m.ReceiveFailed(1, "not mapped"))
    await settle()
    [first, again] = [request for _, request in world.asked]
    assert 0 < first.first_token_s < 0.02 and again.first_token_s == 60.0
    assert again.token_timeout_s == first.token_timeout_s == 60.0
    await asyncio.sleep(0.03)
    assert not errors(world)
    world.request.cancel()  # type: ignore[attr-defined]


async def test_request_without_a_further_token_ends_here(place: Callable[..., World]) -> None:
    world = place(deadlines=(60.0, 0.05))
    await settle()
    for token in (8, 9, 10):
        await asyncio.sleep(0.03)
        world.request.on_token(token, Finish.NONE, None)  # type: ignore[attr-defined]
    assert not errors(world)
    await asyncio.sleep(0.11)
    [last] = errors(world)
    assert last.expired and "next token did not come within 0.05 s" in last.error


async def test_engine_that_drops_an_expired_sequence_ends_the_request(
    place: Callable[..., World],
) -> None:
    world = place(unusable={"p", "q", "r"}, deadlines=(60.0, 0.0))
    await settle()
    world.event(m.Expired(world.local[0].handle))
    assert [output.expired for output in errors(world)] == [True]
