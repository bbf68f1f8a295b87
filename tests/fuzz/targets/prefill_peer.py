"""Both ends of Prefill.Run against a hostile peer (prefill_worker, decode_worker, kvtransfer).

The prefill worker gets any messages of a caller; the decode worker gets any events of the prefill
worker. Each ends with an error of the call or of the transfer, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError

from decode_worker.handover import Handover
from engine.ipc import messages as m
from engine.kv_cache.kv_format import KVFormat
from kvtransfer.carrier import InboundRequest
from kvtransfer.carriers.slot_outbound import SlotOutboundLink
from kvtransfer.inbound_frames import InboundFrames
from kvtransfer.links import LinkTable
from kvtransfer.traffic import TrafficCounter
from prefill_worker.service import PrefillService
from protocol.errors import TransferFailed
from protocol.requests import Finish, Request
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget
from tests.fuzz.virtual_loop import VirtualLoop

KV = KVFormat(precision="fp8", storage="wide", layers=2, kv_heads=1, head_dim=16, element_bytes=2)
FRAME_BYTES = 4 * KV.layers * KV.block_layer_bytes(KV.codecs[0])
READY = m.EngineReady("model", 320, 1 << 16, KV, 1 << 20, 0.01, prefill_chunk=64)
_INSTANCE = "here"
_SLOTS = 8


class _Session:
    """An engine session without an engine: reservations are granted, and prompts are computed."""

    def __init__(self) -> None:
        self.ready = READY
        self.beat = m.EngineBeat(0, 0, 0, 0)
        self.queued_tokens = self.queued_prompts = 0
        self.latest_prompts = ()
        self.alive = True
        self.listeners: dict[int, Any] = {}
        self.arena = SimpleNamespace(
            shape=SimpleNamespace(slot_bytes=FRAME_BYTES),
            slot=lambda slot, nbytes: memoryview(bytearray(nbytes)),
        )
        self.freed: list[int] = []
        self.lent = 0  # slots with a frame
        self.on_reserve: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()

    def attach(self, handle: int, listener: Any) -> None:
        self.listeners[handle] = listener

    def detach(self, handle: int) -> None:
        self.listeners.pop(handle, None)

    def send(self, command: Any) -> None:
        if isinstance(command, m.Reserve):
            self._loop.call_soon(self.on_reserve)
        elif isinstance(command, m.Prefill):
            self._loop.call_soon(self._compute, command)

    def send_prompt(self, command: Any) -> None:
        self.send(command)

    def send_slot(self, command: Any) -> None:
        if isinstance(command, m.SlotsFree):
            self.lent -= len(command.slots)
        elif isinstance(command, m.Ingest):
            assert command.nbytes <= FRAME_BYTES

    def _compute(self, command: m.Prefill) -> None:
        """One frame, and the first token."""
        listener = self.listeners.get(command.handle)
        if listener is not None:
            listener.on_event(m.Started(command.handle, 0))
            listener.on_token(7, Finish.NONE, None)


def fuzz_one(data: bytes) -> None:
    reader = ByteReader(data)
    as_caller = reader.number(2) == 0
    loop = VirtualLoop()
    try:
        loop.run_until_complete((_serve if as_caller else _receive)(reader))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
    finally:
        loop.close()
    assert not loop.errors, loop.errors[0]


# ---- a hostile caller ------------------------------------------------------------------------


class _Aborted(Exception):
    """The service has ended the call with a status."""


class _Context:
    def __init__(self) -> None:
        self.ended: Callable[[Any], None] = lambda context: None

    async def abort(self, code: Any, details: str) -> None:
        assert len(details) < 2000, "a status quotes the message"
        raise _Aborted(code)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.ended = callback


class _Carrier:
    """A carrier in whose slots the caller reads itself."""

    name = "slots"
    needs_slots = False

    def accept(self, offer: pb.CarrierOffer, session: Any) -> str | None:
        return "" if len(offer.address) < 100 else None

    def open(
        self, transfer: bytes, offer: Any, session: Any, say: Callable[[pb.PrefillEvent], None]
    ) -> SlotOutboundLink:
        assert len(transfer) == 16
        return SlotOutboundLink(say)

    def connect(self, request: InboundRequest) -> _InboundLink:
        return _InboundLink(request)


async def _serve(reader: ByteReader) -> None:
    session = _Session()
    engine: Any = SimpleNamespace(current=session, handle=lambda: 1)
    service = PrefillService(engine, [_Carrier()], SimpleNamespace(), _INSTANCE)  # type: ignore
    context: Any = _Context()

    async def calls() -> AsyncIterator[pb.PrefillCall]:
        while reader.left:
            with contextlib.suppress(DecodeError):
                yield pb.PrefillCall.FromString(reader.piece(4000))
            await asyncio.sleep(0)
        await asyncio.sleep(5)

    try:
        async for event in service.Run(calls(), context):
            assert event.WhichOneof("body")
    except _Aborted:
        pass
    context.ended(context)
    await asyncio.sleep(1)
    assert service.calls == 0 and not session.listeners, "a call has not ended"
    assert session.lent == 0, "slots are lost"


# ---- a hostile prefill worker ----------------------------------------------------------------


class _InboundLink:
    """Frames lie in slots of the other worker, as with the carrier ``local``."""

    def __init__(self, request: InboundRequest) -> None:
        self._request = request
        self._frames: InboundFrames | None = None

    def receive(self, frames: InboundFrames) -> None:
        self._frames = frames

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        if self._frames is None:
            raise TransferFailed("a frame came without a credit")
        for filled in slots:
            if filled.slot >= _SLOTS:
                raise TransferFailed("no such slot")
            header = self._frames.ingest_in_place(
                filled.header, 1, filled.slot, filled.generation, FRAME_BYTES
            )
            self.on_slot_read(header.sequence)

    def on_slot_read(self, sequence: int) -> None:
        taken = pb.PrefillCall.Taken(sequences=[sequence])
        self._request.say(pb.PrefillCall(taken=taken))

    async def close(self) -> None:
        self._frames = None


class _Stream:
    """The control call: gives the events of the input, one at each turn, and then stays silent."""

    def __init__(self, events: list[pb.PrefillEvent]) -> None:
        self._events = events
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    async def write(self, _message: pb.PrefillCall) -> None:
        return None

    async def read(self) -> pb.PrefillEvent | None:
        await asyncio.sleep(0.01)
        if self._events:
            return self._events.pop(0)
        await self._cancelled.wait()
        return None

    async def details(self) -> str:
        return "over"


def _events(reader: ByteReader) -> list[pb.PrefillEvent]:
    """Events of the input; a number stands for one that is due in an orderly call."""
    orderly = [
        pb.PrefillEvent(accepted=pb.PrefillEvent.Accepted(carrier="slots")),
        pb.PrefillEvent(started=pb.PrefillEvent.Started()),
        pb.PrefillEvent(computed=pb.PrefillEvent.Computed(tokens=64)),
        pb.PrefillEvent(first_token=pb.PrefillEvent.FirstToken(token=7)),
        pb.PrefillEvent(sent=pb.PrefillEvent.Sent(frames=1)),
        pb.PrefillEvent(fetching=pb.PrefillEvent.Fetching()),
        pb.PrefillEvent(alive=pb.PrefillEvent.Alive()),
    ]
    found = []
    while reader.left:
        kind = reader.number(len(orderly) + 1)
        if kind < len(orderly):
            found.append(orderly[kind])
            continue
        with contextlib.suppress(DecodeError):
            found.append(pb.PrefillEvent.FromString(reader.piece(4000)))
    return found


async def _receive(reader: ByteReader) -> None:
    scored = reader.number(2) == 1
    session = _Session()
    sampling = SamplingParams(logprobs=1, prompt_logprobs=1) if scored else SamplingParams()
    tokens = (3, 40, 200)[reader.number(3)]
    request = Request(id="a", prompt=(1,) * tokens, sampling=sampling, cache_root=bytes(16))
    offer = pb.CarrierOffer(name="slots", codec=KV.codecs[0], frame_bytes=FRAME_BYTES)
    context: Any = SimpleNamespace(
        session=session,
        slots=SimpleNamespace(serve=lambda: None, remove=lambda w: None, release=lambda s: None),
        carriers={"slots": _Carrier()},
        links=LinkTable(["slots"], 0.0),
        traffic=TrafficCounter(),
        carrier_offers=lambda instance, endpoint: [offer],
        connections=lambda instance, carrier: 1,
    )
    candidate = pb.PrefillCandidate(instance="p", endpoint="p:1")
    stream: Any = _Stream(_events(reader))
    marks: list[str] = []

    async def look_up() -> int:
        return 0

    handover = Handover(context, stream, candidate, 1, request, look_up, marks.append)
    session.on_reserve = handover.pages_reserved.set
    try:
        async with handover.open():
            first = await handover.first_token()
            assert first.token < READY.vocab_size
            assert (first.logprobs is not None) == scored
            assert len(first.prompt_logprobs) == (tokens - 1 if scored else 0)
            measured = await handover.remaining_kv()
            assert measured.kv_bytes >= 0 and handover.frames > 0
    except TransferFailed as error:
        assert len(str(error)) < 2000, "an error quotes the message"
    await asyncio.sleep(2)


TARGET = FuzzTarget(
    "prefill_peer", fuzz_one, Budget(base_s=0.3, s_per_byte=2e-4, bytes_per_byte=4000)
)
