"""What the engine hears of one call: nothing before its work, and its end once."""

from __future__ import annotations

from typing import Any

import pytest

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from kvtransfer.frames import TRANSFER_BYTES
from prefill_worker.served_call import MAX_BLOCKS, MAX_CREDITS, AgreedFrames, ServedCall
from protocol.errors import TransferFailed
from protocol.wire import wire_pb2 as pb
from tests.engine.conftest import request

WORK = m.Prefill(1, request("1", [3, 4]), 1 << 20, Codec.RAW)


class Session:
    """Keeps what the engine is told: all of it in one order."""

    def __init__(self) -> None:
        self.told: list[m.Command | m.SlotCommand] = []

    def send(self, command: m.Command) -> None:
        self.told.append(command)

    def send_prompt(self, command: m.Generate | m.Prefill) -> None:
        self.told.append(command)

    def send_slot(self, command: m.SlotCommand) -> None:
        self.told.append(command)

    def detach(self, handle: int) -> None:
        assert handle == 1


class NoCarrier:
    """A carrier and its link, for calls without frames."""

    def open(self, *_: Any) -> NoCarrier:
        return self

    def close(self) -> None:
        pass


def new_call() -> tuple[ServedCall, Session]:
    session: Any = Session()
    carrier: Any = NoCarrier()
    frames = AgreedFrames(carrier, pb.CarrierOffer(), "", Codec.RAW, 1 << 20)
    start = pb.PrefillStart(transfer=bytes(TRANSFER_BYTES).hex())
    return ServedCall(session, 1, frames, start), session


def test_call_that_ends_before_its_work_leaves_nothing_in_the_engine() -> None:
    """The engine would keep the offer until its step loop has ended it, too."""
    call, session = new_call()
    call.take(pb.PrefillCall(credits=4))  # while blocks are fetched from another worker
    call.close()
    assert session.told == []


def test_early_credits_are_granted_with_the_work() -> None:
    call, session = new_call()
    call.take(pb.PrefillCall(credits=4))
    call.take(pb.PrefillCall(credits=5))
    call.begin(WORK)
    call.take(pb.PrefillCall(credits=1))
    call.close()
    grants = [m.Grant(1, 9), m.Grant(1, 1)]
    assert session.told == [WORK, *grants, m.EndOffer(1), m.Drop(1)]


def test_what_the_caller_has_is_skipped_before_any_frame() -> None:
    for early in (True, False):
        call, session = new_call()
        if not early:
            call.begin(WORK)
        call.take(pb.PrefillCall(skip_blocks=3))
        call.take(pb.PrefillCall(credits=5))
        if early:
            call.begin(WORK)
        assert session.told == [WORK, m.Skip(1, 3), m.Grant(1, 5)]


@pytest.mark.parametrize("blocks", [(1, 2), (MAX_BLOCKS + 1,)])
def test_no_prompt_has_so_many_blocks_to_skip(blocks: tuple[int, ...]) -> None:
    call, _ = new_call()
    with pytest.raises(TransferFailed, match="skip_blocks must come once"):
        for number in blocks:
            call.take(pb.PrefillCall(skip_blocks=number))


def test_early_credits_are_bounded() -> None:
    call, session = new_call()
    for _ in range(3):
        call.take(pb.PrefillCall(credits=MAX_CREDITS))
    call.begin(WORK)
    assert session.told == [WORK, m.Grant(1, MAX_CREDITS)]


def test_expired_prompt_ends_the_call() -> None:
    call, session = new_call()
    call.begin(WORK)
    call.on_event(m.Expired(1))
    assert "deadline" in str(call.messages.get_nowait())
    call.close()
    assert session.told[-2:] == [m.EndOffer(1), m.Drop(1)]  # the engine has forgotten it already
