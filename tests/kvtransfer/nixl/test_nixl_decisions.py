"""What is decided about NIXL without the library: addresses, stuck reads, restarts, peers."""

from __future__ import annotations

import asyncio
import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.nixl import peers
from kvtransfer.nixl.messages import (
    MAX_METADATA_BYTES,
    AddPeer,
    ForgetPeer,
    MoverAddress,
    MoverCommand,
    encode_packet,
)
from kvtransfer.nixl.mover_keeper import FIRST_DELAY_S, MAX_DELAY_S, RestartDelay
from kvtransfer.nixl.peers import PeerTable
from kvtransfer.nixl.stalls import PeerProgress
from protocol.errors import CarrierFailed, TransferFailed

GOOD = MoverAddress(bytes(16), b"metadata", 4096, 8192, 8, 4, 1 << 20)


def test_an_address_survives_its_text() -> None:
    assert MoverAddress.decode(GOOD.encode()) == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"token": b"short"},
        {"metadata": b""},
        {"metadata": bytes(MAX_METADATA_BYTES + 1)},
        {"probe": 0},
        {"probe": (1 << 64) - 1},
        {"slots_at": -1},
        {"slots_at": (1 << 64) - 1},
        {"first_slot": -1},
        {"slots": 0},
        {"slots": 1 << 40},
        {"stride": 0},
        {"stride": 1 << 40},
    ],
)
def test_an_address_that_cannot_be_right_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CarrierFailed):
        MoverAddress.decode(msgspec.structs.replace(GOOD, **change).encode())


@given(
    st.one_of(
        st.text(max_size=200),
        st.binary(max_size=200).map(lambda data: base64.b64encode(data).decode()),
    )
)
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        MoverAddress.decode(text)
    except CarrierFailed:
        return


def test_a_long_text_is_refused() -> None:
    with pytest.raises(CarrierFailed, match="too many"):
        MoverAddress.decode("A" * (1 << 20))


@given(slot=st.integers(-10, 1 << 32), nbytes=st.integers(-1, 1 << 32))
def test_only_slots_that_are_served_are_located(slot: int, nbytes: int) -> None:
    if 8 <= slot < 12 and 0 < nbytes <= 1 << 20:
        assert GOOD.locate(slot, nbytes) == 8192 + (slot - 8) * (1 << 20)
    else:
        with pytest.raises(TransferFailed):
            GOOD.locate(slot, nbytes)


def test_the_largest_command_is_one_packet() -> None:
    packet = encode_packet(AddPeer(1, bytes(16), bytes(MAX_METADATA_BYTES), 1 << 63))
    assert len(packet) < MAX_METADATA_BYTES + 256


def test_a_read_is_stuck_when_none_from_its_peer_has_ended() -> None:
    progress = PeerProgress()
    progress.began(1, now=0.0)
    progress.began(2, now=2.0)
    assert progress.stuck(2.9, 3.0) is None
    assert progress.stuck(3.0, 3.0) == 1
    progress.ended(1, now=3.0)  # the link moves: the second one has time again
    assert progress.stuck(5.9, 3.0) is None
    assert progress.stuck(6.0, 3.0) == 2
    progress.ended(2, now=6.0)
    assert progress.stuck(100.0, 3.0) is None
    progress.began(3, now=100.0)
    assert progress.stuck(102.0, 3.0) is None


def test_movers_that_were_of_no_use_are_replaced_later_each_time() -> None:
    delay, now = RestartDelay(), 0.0
    assert delay.may_start(now)
    waits = []
    for _ in range(12):
        delay.lost(now, proven=False)
        began = now
        while not delay.may_start(now):
            now += FIRST_DELAY_S / 4
        waits.append(now - began)
    assert waits[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert waits[-1] == MAX_DELAY_S
    delay.lost(now, proven=True)
    assert delay.may_start(now)


def address(number: int) -> MoverAddress:
    return msgspec.structs.replace(GOOD, token=number.to_bytes(16, "big"))


async def test_transfers_share_a_peer_and_idle_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "MAX_IDLE_PEERS", 2)
    sent: list[MoverCommand] = []
    table = PeerTable(sent.append)
    waiting = [asyncio.create_task(table.acquire(address(1))) for _ in range(3)]
    await asyncio.sleep(0)
    assert [type(command) for command in sent] == [AddPeer]
    table.on_added(1)
    assert await asyncio.gather(*waiting) == [1, 1, 1]
    for number in (2, 3, 4):
        task = asyncio.create_task(table.acquire(address(number)))
        await asyncio.sleep(0)
        table.on_added(number)
        assert await task == number
        table.release(address(number))
    assert sent[-1] == ForgetPeer(2)  # the oldest idle one; the first has transfers
    for _ in range(3):
        table.release(address(1))
    assert sent[-1] == ForgetPeer(3)


async def test_a_peer_that_failed_is_tried_again() -> None:
    sent: list[MoverCommand] = []
    table = PeerTable(sent.append)
    task = asyncio.create_task(table.acquire(address(1)))
    await asyncio.sleep(0)
    table.on_failed(1, "it did not answer")
    with pytest.raises(CarrierFailed, match="it did not answer"):
        await task
    again = asyncio.create_task(table.acquire(address(1)))
    await asyncio.sleep(0)
    table.on_added(2)
    assert await again == 2


async def test_a_lost_mover_fails_who_waits_for_a_peer() -> None:
    table = PeerTable(lambda command: None)
    task = asyncio.create_task(table.acquire(address(1)))
    await asyncio.sleep(0)
    table.on_lost(TransferFailed("lost"))
    with pytest.raises(TransferFailed, match="lost"):
        await task
    table.release(address(1))  # of a mover that is gone: nothing to do
