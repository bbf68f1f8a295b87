"""Messages of a hostile router to a decode worker (decode_worker/service.py, Decode.Attach).

Whatever comes, every request that was submitted ends once, and after the stream nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError

from decode_worker.service import DecodeService
from engine.ipc import messages as m
from protocol.errors import TransferFailed
from protocol.requests import Finish
from protocol.wire import wire_pb2 as pb
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget
from tests.fuzz.virtual_loop import VirtualLoop

_MAX_MODEL_LEN = 4096


class _Engine:
    """An engine that draws the token 7 until a request is complete, and answers look-ups."""

    def __init__(self) -> None:
        self.listeners: dict[int, Any] = {}
        self.current: Any = SimpleNamespace(
            ready=SimpleNamespace(
                max_model_len=_MAX_MODEL_LEN, prefill_chunk=64, kv_tokens=1 << 20
            ),
            beat=m.EngineBeat(0, 0, 0, 0),
            queued_tokens=0,
            queued_prompts=0,
            latest_prompts=(),
            alive=True,
            attach=self.listeners.__setitem__,
            detach=lambda handle: self.listeners.pop(handle, None),
            send=self._send,
            send_prompt=self._send,
            send_slot=lambda command: None,
        )
        self._handles = 0
        self._loop = asyncio.get_running_loop()

    async def session(self, _wait_s: float) -> Any:
        return self.current

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    def _send(self, command: Any) -> None:
        if isinstance(command, m.Generate):
            assert len(command.request.context) <= _MAX_MODEL_LEN
            self._loop.call_soon(self._generate, command)
        elif isinstance(command, m.Receive):
            self._loop.call_soon(self._tell, command.handle, m.PrefixFound(command.handle, 0))

    def _tell(self, handle: int, event: Any) -> None:
        if handle in self.listeners:
            self.listeners[handle].on_event(event)

    def _generate(self, command: m.Generate) -> None:
        request = command.request
        self._tell(command.handle, m.Started(command.handle, 0))
        for count in range(len(request.emitted) + 1, min(request.sampling.max_tokens, 3) + 1):
            listener = self.listeners.get(command.handle)
            if listener is None:
                return
            is_last = count == min(request.sampling.max_tokens, 3)
            listener.on_token(7, Finish.LENGTH if is_last else Finish.NONE, None)


def _refuse_to_dial(_endpoint: str) -> Any:
    raise TransferFailed("this endpoint may not be dialled")


def _receiver(engine: _Engine) -> Any:
    """A receiver that reaches no other worker."""
    channels = SimpleNamespace(
        is_suspected=lambda endpoint: len(endpoint) % 2 == 1,
        suspect=lambda endpoint: None,
        open_call=_refuse_to_dial,
    )
    links = SimpleNamespace(usable=lambda instance: len(instance) % 3 != 2)
    context = SimpleNamespace(session=engine.current, channels=channels, links=links)
    return SimpleNamespace(context=lambda: context)


class _Context:
    """The part of a gRPC call's context that the service uses."""

    def __init__(self) -> None:
        self.ended: Callable[[Any], None] = lambda context: None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.ended = callback


def fuzz_one(data: bytes) -> None:
    messages = list(_messages(ByteReader(data)))
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_stream(messages))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
    finally:
        loop.close()
    assert not loop.errors, loop.errors[0]


def _messages(reader: ByteReader) -> list[pb.RouterMessage]:
    found = []
    while reader.left:
        try:
            found.append(pb.RouterMessage.FromString(reader.piece(4000)))
        except DecodeError:
            continue
    return found


async def _stream(messages: list[pb.RouterMessage]) -> None:
    engine = _Engine()
    service = DecodeService(engine, _receiver(engine), "here")  # type: ignore[arg-type]
    context: Any = _Context()

    async def incoming() -> AsyncIterator[pb.RouterMessage]:
        for message in messages:
            yield message
            await asyncio.sleep(0)
        await asyncio.sleep(60)  # a look-up, a fetch and every other wait end by then

    ends: Counter[str] = Counter()
    async for message in service.Attach(incoming(), context):
        ends.update(output.id for output in message.outputs if output.finish != pb.FINISH_NONE)
    context.ended(context)
    await asyncio.sleep(1)
    assert service.request_count == 0, "requests are left"
    assert not engine.listeners, "sequences are left in the engine"
    submitted = Counter(submit.request.id for message in messages for submit in message.submit)
    cancelled = {name for message in messages for name in message.cancel}
    assert ends <= submitted, "a request has ended twice"
    unanswered = set(submitted - ends) - cancelled
    assert not unanswered, f"requests have not ended: {unanswered}"


TARGET = FuzzTarget(
    "decode_service",
    fuzz_one,
    Budget(base_s=0.4, s_per_byte=2e-4, base_bytes=4 << 20, bytes_per_byte=6000),
    examples=60,
)
