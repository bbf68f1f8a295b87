"""Frames of another worker's arena: what is read is what was sent, or the sequence is told."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from engine.ipc import messages as m
from engine.ipc.shared_memory import Arena, ArenaShape, PeerArena, SlotLayout
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.slots.peer_slots import PeerSlots, copy_and_hash
from protocol.errors import CarrierFailed, TransferFailed

SHAPE = ArenaShape(slot_bytes=600_000, inbound=1, outbound=3)
PIECE = KVPiece(0, 1, 0, 1)
ARENA = 7


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(SHAPE)
    yield made
    made.release_fd()


@pytest.fixture
def peers(arena: Arena) -> Iterator[PeerSlots]:
    made = PeerSlots()
    slots = len(SHAPE.inbound_slots() + SHAPE.outbound_slots())
    made.map(m.MapArena(ARENA, SHAPE.slot_bytes, slots), arena.readonly_fd)
    yield made
    made.close()


def fill(arena: Arena, slot: int, seed: int, nbytes: int = 600_000) -> m.Ingest:
    """Put a frame into a slot, and return the command that reads it."""
    payload = np.random.default_rng(seed).bytes(nbytes)
    arena.begin_fill(slot)
    arena.slot(slot, nbytes)[:] = payload
    generation = arena.end_fill(slot)
    checksum = xxhash.xxh3_64_intdigest(payload)
    where = 1, seed, slot, PIECE, nbytes, Codec.RAW
    return m.Ingest(*where, arena=ARENA, generation=generation, checksum=checksum)


def copied(peers: PeerSlots, command: m.Ingest) -> bytes:
    out = np.zeros(command.nbytes, dtype=np.uint8)
    peers.copy(command, out)
    return out.tobytes()


@pytest.mark.parametrize("nbytes", [1, 4097, 1 << 18, (1 << 18) + 1, 600_000])
def test_frame_is_read_as_it_was_sent(arena: Arena, peers: PeerSlots, nbytes: int) -> None:
    command = fill(arena, 2, 5, nbytes)
    assert copied(peers, command) == bytes(arena.slot(2, nbytes))


def test_slot_that_was_filled_again_is_refused(arena: Arena, peers: PeerSlots) -> None:
    command = fill(arena, 2, 5)
    fill(arena, 2, 6)
    with pytest.raises(TransferFailed, match="generation 4, expected 2"):
        copied(peers, command)


def test_slot_that_is_being_filled_is_refused(arena: Arena, peers: PeerSlots) -> None:
    command = fill(arena, 2, 5)
    arena.begin_fill(2)
    with pytest.raises(TransferFailed, match="filled again"):
        copied(peers, command)


def test_other_bytes_of_the_same_generation_are_refused(arena: Arena, peers: PeerSlots) -> None:
    command = fill(arena, 2, 5)
    arena.slot(2, 600_000)[599_999] ^= 1
    with pytest.raises(TransferFailed, match="checksum"):
        copied(peers, command)


def test_late_reader_never_takes_another_frame_for_its_own(arena: Arena, peers: PeerSlots) -> None:
    """A writer fills the slot over and over while it is read."""
    commands: list[m.Ingest] = []
    stop = threading.Event()

    def write() -> None:
        seed = 0
        while not stop.is_set():
            seed += 1
            commands.append(fill(arena, 1, seed))

    thread = threading.Thread(target=write)
    thread.start()
    read = refused = 0
    until = time.monotonic() + 20
    while (read + refused < 300 or not refused) and time.monotonic() < until:
        if not commands:
            continue
        command = commands[-1]
        try:
            data = copied(peers, command)
        except TransferFailed:
            refused += 1
        else:
            assert xxhash.xxh3_64_intdigest(data) == command.checksum
            read += 1
    stop.set()
    thread.join()
    assert refused, "the writer was never faster than the reader"


@pytest.mark.parametrize(
    "change",
    [{"slot": 4}, {"slot": -1}, {"nbytes": 600_001}, {"nbytes": 0}],
    ids=lambda change: str(change),
)
def test_frame_outside_the_arena_is_refused(
    arena: Arena, peers: PeerSlots, change: dict[str, int]
) -> None:
    command = fill(arena, 2, 5)
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    wrong = m.Ingest(**{**fields, **change})
    with pytest.raises(CarrierFailed, match="not in its arena"):
        copied(peers, wrong)


def test_frame_of_an_unmapped_arena_is_refused(arena: Arena, peers: PeerSlots) -> None:
    command = fill(arena, 2, 5)
    peers.unmap(ARENA)
    peers.unmap(99)
    with pytest.raises(CarrierFailed, match="arena 7 of another worker is not mapped"):
        copied(peers, command)


def test_arena_without_a_descriptor_fails_its_frames(arena: Arena) -> None:
    def none() -> int:
        raise LookupError("MapArena came without a descriptor")

    peers = PeerSlots()
    peers.map(m.MapArena(ARENA, SHAPE.slot_bytes, 4), none)
    with pytest.raises(CarrierFailed, match="without a descriptor"):
        copied(peers, fill(arena, 2, 5))


def test_arena_can_be_read_alone(arena: Arena) -> None:
    fd = arena.readonly_fd()
    with pytest.raises(OSError):
        os.write(fd, b"x")
    with pytest.raises(OSError):
        os.ftruncate(arena.fd, 10)
    os.close(fd)


# ---- descriptors that are not trusted ------------------------------------------------------------


def memory(nbytes: int, *, sealed: bool) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


LAYOUT = SlotLayout(4096, 4)


def assert_refused(fd: int, layout: SlotLayout, why: str) -> None:
    """The arena is refused, and its descriptor is closed."""
    with pytest.raises(CarrierFailed, match=why):
        PeerArena(fd, layout)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_memory_that_could_shrink_is_refused() -> None:
    assert_refused(memory(LAYOUT.bytes, sealed=False), LAYOUT, "not sealed")


def test_short_memory_is_refused() -> None:
    fd = memory(LAYOUT.bytes - 1, sealed=True)
    assert_refused(fd, LAYOUT, "has 20479 bytes; 4 slots of 4096 bytes take 20480")


def test_other_files_are_refused() -> None:
    assert_refused(os.pipe()[0], LAYOUT, "cannot be mapped")
    assert_refused(os.open("/dev/zero", os.O_RDONLY), LAYOUT, "cannot be mapped")


@pytest.mark.parametrize("layout", [(0, 4), (4096, 0), (-1, 4), (1 << 40, 4), (1, 1 << 40)])
def test_absurd_sizes_are_refused(layout: tuple[int, int]) -> None:
    assert_refused(memory(LAYOUT.bytes, sealed=True), SlotLayout(*layout), "would have")


def test_copy_and_hash_of_portions_is_the_hash_of_the_whole() -> None:
    source = np.random.default_rng(1).integers(0, 256, 1_000_001, dtype=np.uint8)
    out = np.zeros_like(source)
    assert copy_and_hash(source, out) == xxhash.xxh3_64_intdigest(source.tobytes())
    assert np.array_equal(source, out)
