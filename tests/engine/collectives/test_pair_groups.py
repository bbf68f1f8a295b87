"""Pairs of engines over gloo: connecting, sending, and the ways in which the other end can fail."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.collectives.collective_thread import RECEIVE_S, SEND_S
from engine.collectives.pair_groups import OPEN_S
from engine.ipc.pair_messages import (
    ClosePair,
    OpenPair,
    PairClosed,
    PairReady,
    PairReceive,
    PairSend,
    PairValue,
    SlotFilled,
    SlotSent,
)
from tests.engine.collectives.pair_engines import (
    HOST,
    SLOT_BYTES,
    PairEngine,
    RemoteEngine,
    engines,
    make_bytes,
    open_pair,
    wait_for,
)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def transfer(p: PairEngine, d: PairEngine, pair: str, nbytes: int = SLOT_BYTES) -> None:
    """Send slot 0 of P to slot 1 of D."""
    d.submit(PairReceive(pair, 5, 0, 1, nbytes))
    p.submit(PairSend(pair, 7, 0, 0, nbytes))
    assert wait_for(p, SlotSent) == SlotSent(pair, 7, 0)
    assert wait_for(d, SlotFilled) == SlotFilled(pair, 5, 0)


def test_frames_of_any_length_arrive_as_they_were_sent() -> None:
    with engines(PairEngine, PairEngine) as (p, d):
        open_pair(p, d, "a")
        for nbytes in (1, 8, 100_000, SLOT_BYTES):
            p.fill(0, nbytes)
            d.slots.zero_()
            transfer(p, d, "a", nbytes)
            assert torch.equal(d.slots[1, :nbytes], make_bytes(nbytes, SLOT_BYTES)[:nbytes])
            assert not d.slots[1, nbytes:].any()


def test_closed_pairs_leave_no_thread_and_no_descriptor() -> None:
    with engines(PairEngine, PairEngine) as (p, d):
        open_pair(p, d, "warm-up")
        before: tuple[int, int] | None = None
        for i in range(8):
            open_pair(p, d, f"pair {i}")
            transfer(p, d, f"pair {i}")
            for engine in (p, d):
                engine.submit(ClosePair(f"pair {i}"))
                assert wait_for(engine, PairClosed) == PairClosed(f"pair {i}", "")
            before = before or (count_descriptors(), count_threads())
            until = time.monotonic() + 5.0  # a thread may still be ending
            while (now := (count_descriptors(), count_threads())) != before:
                assert time.monotonic() < until, (now, before)
                time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "collectives"]


@pytest.mark.long
def test_killed_peer_ends_its_pair_at_once_and_no_other() -> None:
    with engines(RemoteEngine, PairEngine, PairEngine) as (lost, d, p):
        assert isinstance(d, PairEngine) and isinstance(p, PairEngine)
        open_pair(lost, d, "lost")
        open_pair(p, d, "kept")
        d.submit(PairReceive("lost", 1, 0, 0, SLOT_BYTES))
        d.submit(PairReceive("lost", 1, 1, 1, SLOT_BYTES))
        time.sleep(0.2)
        began = time.monotonic()
        lost.kill(signal.SIGKILL)  # type: ignore[union-attr]
        assert wait_for(d, PairClosed).pair == "lost"
        assert time.monotonic() - began < 1
        assert wait_for(d, PairClosed).pair == "lost"  # the second receive
        transfer(p, d, "kept")


@pytest.mark.long
def test_stopped_sender_costs_the_deadline_and_writes_nothing_afterwards() -> None:
    with engines(RemoteEngine, PairEngine) as (p, d):
        assert isinstance(p, RemoteEngine) and isinstance(d, PairEngine)
        open_pair(p, d, "a")
        p.kill(signal.SIGSTOP)
        began = time.monotonic()
        d.submit(PairReceive("a", 1, 0, 0, SLOT_BYTES))
        p.submit(PairSend("a", 1, 0, 3, SLOT_BYTES))
        assert "pair a failed" in wait_for(d, PairClosed).why
        assert RECEIVE_S - 0.5 < time.monotonic() - began < RECEIVE_S + 2
        p.kill(signal.SIGCONT)  # now it sends
        assert wait_for(p, PairClosed).pair == "a"
        assert not d.slots.any()


@pytest.mark.long
def test_stopped_receiver_costs_the_deadline_of_a_send() -> None:
    with engines(PairEngine, RemoteEngine) as (p, d):
        assert isinstance(d, RemoteEngine)
        open_pair(p, d, "a")
        d.kill(signal.SIGSTOP)
        began = time.monotonic()
        for sequence in range(8):  # the first ones may fit into the buffers of the sockets
            p.submit(PairSend("a", 1, sequence, 0, SLOT_BYTES))
        while isinstance(event := p.wait_event(10), SlotSent):
            pass
        assert isinstance(event, PairClosed)
        assert time.monotonic() - began < SEND_S + 2
        d.kill(signal.SIGCONT)


def test_peer_that_never_opens_costs_the_deadline() -> None:
    with engines(PairEngine) as (d,):
        began = time.monotonic()
        d.submit(OpenPair("a", 1, HOST))
        d.submit(PairReceive("a", 1, 0, 0, 100))
        wait_for(d, PairValue)
        assert "could not be connected" in wait_for(d, PairClosed).why
        assert OPEN_S - 0.5 < time.monotonic() - began < OPEN_S + 1
        assert wait_for(d, PairClosed).why == "pair a is not open"


@pytest.mark.long
def test_peer_that_stops_while_the_pair_is_connected_costs_the_deadline() -> None:
    with engines(RemoteEngine, PairEngine) as (p, d):
        assert isinstance(p, RemoteEngine)
        p.submit(OpenPair("a", 0, HOST))
        value = p.wait_event(5)
        assert isinstance(value, PairValue)
        p.kill(signal.SIGSTOP)
        began = time.monotonic()
        d.submit(OpenPair("a", 1, HOST))
        d.submit(value)
        wait_for(d, PairValue)
        event = d.wait_event(10)
        if event == PairReady("a"):  # the kernel of the stopped process accepts connections
            d.submit(PairReceive("a", 1, 0, 0, 100))
            event = d.wait_event(10)
        assert isinstance(event, PairClosed)
        assert time.monotonic() - began < OPEN_S + RECEIVE_S + 2


def test_close_ends_an_opening_early_and_skips_what_is_queued() -> None:
    with engines(PairEngine) as (d,):
        began = time.monotonic()
        d.submit(OpenPair("a", 1, HOST))
        d.submit(PairReceive("a", 1, 0, 0, 100))
        wait_for(d, PairValue)
        d.submit(ClosePair("a"))
        events = [wait_for(d, PairClosed)]
        while events[-1].why:
            events.append(wait_for(d, PairClosed))
        assert time.monotonic() - began < 1


def test_pair_that_is_closed_before_it_is_opened_does_not_end_the_thread() -> None:
    """A worker that names a pair twice makes its peer's front say so."""
    with engines(PairEngine) as (p,):
        p.submit(OpenPair("busy", 0, HOST))  # both commands below wait for it
        wait_for(p, PairValue)
        p.submit(ClosePair("a"))
        p.submit(OpenPair("a", 0, HOST))
        p.submit(ClosePair("busy"))
        closed = [wait_for(p, PairClosed) for _ in range(4)]
        assert [event.pair for event in closed] == ["busy", "a", "a", "busy"]
        assert "closed before it could be connected" in closed[2].why


def test_least_recently_used_idle_pair_is_closed_for_a_new_one() -> None:
    small = lambda: PairEngine(limit=2)  # noqa: E731
    with engines(small, PairEngine) as (p, d):
        open_pair(p, d, "a")
        open_pair(p, d, "b")
        transfer(p, d, "a")
        p.submit(OpenPair("c", 0, HOST))
        d.submit(OpenPair("c", 1, HOST))
        d.submit(wait_for(p, PairValue))
        p.submit(wait_for(d, PairValue))
        assert wait_for(p, PairReady).pair == "c"
        assert wait_for(p, PairClosed).pair == "b"
        assert wait_for(d, PairReady).pair == "c"
        transfer(p, d, "a")
        d.submit(PairReceive("b", 1, 0, 0, 100))  # the other end of a closed pair
        assert wait_for(d, PairClosed).pair == "b"


def test_engine_does_not_send_and_receive_at_a_time() -> None:
    with engines(PairEngine, PairEngine) as (x, y):
        open_pair(x, y, "a")
        y.submit(PairReceive("a", 1, 0, 0, 100))
        y.submit(OpenPair("b", 0, HOST))
        y.submit(PairReceive("a", 1, 1, 0, 100))  # keeps pair a in use
        x.submit(PairSend("a", 1, 0, 0, 100))
        wait_for(y, SlotFilled)
        assert "at the same time" in wait_for(y, PairClosed).why
        x.submit(PairSend("a", 1, 1, 0, 100))
        wait_for(y, SlotFilled)


def test_slot_that_does_not_exist_closes_the_pair() -> None:
    with engines(PairEngine, PairEngine) as (p, d):
        open_pair(p, d, "a")
        p.submit(PairSend("a", 1, 0, 99, 100))
        assert "slot 99" in wait_for(p, PairClosed).why
        d.submit(PairReceive("a", 1, 0, 0, 100))
        assert wait_for(d, PairClosed).pair == "a"


def test_values_for_unknown_pairs_and_too_large_ones_are_ignored() -> None:
    with engines(PairEngine) as (d,):
        d.submit(PairValue("nobody's", "0/0", b"x"))
        d.submit(OpenPair("a", 1, HOST))
        d.submit(PairValue("a", "0/0", bytes(1 << 20)))
        wait_for(d, PairValue)
        assert "did not answer" in wait_for(d, PairClosed).why
