"""``CudaCopyDevice`` with real streams on a GPU; without one, with streams that keep a log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ipc.shared_memory import Arena, ArenaShape
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.kv_cache.kv_pool import FrameCopy, FrameDefect, KVPool
from engine.process.cuda_copies import CudaCopyDevice
from engine.process.slot_copies import ArenaFrame
from tests.kernels.test_kv_copy import LAYERS, PAGES, POOLS, empty_pool, filled_pool

SHAPE = ArenaShape(slot_bytes=(1 << 16) + 8, inbound=3, outbound=2)
PIECES = [(KVPiece(0, 4, 0, 1), [6]), (KVPiece(1, 2, 1, 2), [9, 0])]
HEAD_DIM = 32


class LoggedStream:
    """A stream that runs everything at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: LoggedEvent) -> None:
        LOG.append(f"{self.name} waits for {event.recorded}")


class LoggedEvent:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking

    def record(self) -> None:
        self.recorded = f"{current[-1].name} {len(LOG)}"
        LOG.append(f"{current[-1].name} records")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class LoggedRuntime:
    """The part of the CUDA runtime that is called; registration fails with ``code``."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if not self.code:
            self.registered[pointer] = nbytes
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


LOG: list[str] = []
MAIN = LoggedStream("steps")
current = [MAIN]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> LoggedRuntime:
    """CUDA as it is, or its substitute on a CPU."""
    logged = LoggedRuntime()
    if torch.cuda.is_available():
        return logged
    LOG.clear()
    names = iter(("h2d", "d2h"))
    empty = torch.empty

    @contextlib.contextmanager
    def use(stream: LoggedStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            LOG.append(f"{current[-1].name} reads back")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: LoggedStream(next(names)))
    monkeypatch.setattr(torch.cuda, "Event", LoggedEvent)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: LOG.append("host waits"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: logged)
    return logged


def arena_slots() -> tuple[Arena, Tensor]:
    arena = Arena.create(SHAPE)
    slots = torch.frombuffer(arena.map, dtype=torch.uint8).view(-1, SHAPE.slot_bytes)
    return arena, slots


def arena_frames(pool: KVPool, codec: Codec, first: int) -> list[ArenaFrame]:
    size = pool.format.page_layer_bytes(codec)
    return [
        ArenaFrame(first + i, piece.bytes(size), FrameCopy(first + i, piece, pages, codec))
        for i, (piece, pages) in enumerate(PIECES)
    ]


def values(pool: KVPool, device: torch.device) -> Tensor:
    """[layers, pages, page_tokens, 2, kv_heads, head_dim]"""
    pages = torch.arange(PAGES, device=device)
    return torch.stack([pool.layer(layer).gather(pages) for layer in range(LAYERS)])


@pytest.mark.parametrize(("precision", "storage"), POOLS)
@pytest.mark.parametrize("codec", Codec)
def test_frames_go_through_the_arena_and_back(
    runtime: LoggedRuntime, device: torch.device, precision: Any, storage: Any, codec: Codec
) -> None:
    if precision == "exact" and codec is Codec.FP8:
        codec = Codec.RAW  # the only codec of exact KV
    source = filled_pool(precision, storage, torch.bfloat16, HEAD_DIM, device)
    before = values(source, device)
    arena, slots = arena_slots()
    copies = CudaCopyDevice(source, slots, SHAPE, device)
    assert torch.equal(values(source, device), before), "compiling changes nothing"
    outgoing = arena_frames(source, codec, SHAPE.inbound)
    done = copies.gather(outgoing)
    done.wait()
    assert done.is_done()
    expected = torch.zeros(1 << 17, dtype=torch.uint8)
    for slot, nbytes, copy in outgoing:
        assert source.read(copy.piece, copy.pages, expected, codec) == nbytes
        assert torch.equal(slots[slot, :nbytes], expected[:nbytes])
    copies.close()

    target = empty_pool(precision, storage, torch.bfloat16, HEAD_DIM, device)
    copies = CudaCopyDevice(target, slots, SHAPE, device) if device.type == "cuda" else copies
    copies._pool = target
    arriving = [
        ArenaFrame(slot, nbytes, copy._replace(slot=5 - i, pages=()))
        for i, (slot, nbytes, copy) in enumerate(outgoing)
    ]
    fetch = copies.fetch(arriving)
    fetch.wait()
    assert fetch.is_done() and list(fetch.defects()) == [0, 0]
    scattered = [copy._replace(slot=5 - i) for i, (_, _, copy) in enumerate(outgoing)]
    copies.scatter(scattered).wait()
    for _, piece, pages, _ in scattered:
        layers = slice(piece.layer, piece.layer + piece.layers)
        assert torch.equal(values(target, device)[layers, pages], before[layers, pages])
        assert before[layers, pages].any()
    assert not values(target, device)[:, 3].any()
    del arena


def test_defects_are_reported_in_the_order_of_the_frames(
    runtime: LoggedRuntime, device: torch.device
) -> None:
    pool = filled_pool("fp8", "fp8", torch.bfloat16, HEAD_DIM, device)
    _arena, slots = arena_slots()
    copies = CudaCopyDevice(pool, slots, SHAPE, device)
    frames = arena_frames(pool, Codec.FP8, 0)
    slots[1, 5] = 0xFF
    fetch = copies.fetch(frames)
    fetch.wait()
    assert list(fetch.defects()) == [0, int(FrameDefect.NAN_BYTE)]
    copies.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="real streams keep no log")
def test_only_pcie_copies_and_checks_leave_the_stream_of_the_steps(runtime: LoggedRuntime) -> None:
    pool = filled_pool("fp8", "fp8", torch.bfloat16, HEAD_DIM, torch.device("cpu"))
    _arena, slots = arena_slots()
    copies = CudaCopyDevice(pool, slots, SHAPE, torch.device("cpu"))
    assert runtime.registered == {slots.data_ptr(): SHAPE.bytes}
    assert LOG[:3] == ["steps records", "d2h waits for steps 0", "d2h records"]  # the warm-up
    LOG.clear()
    fetch = copies.fetch(arena_frames(pool, Codec.FP8, 0))
    fetch.defects()
    assert LOG == ["h2d reads back", "h2d records"]
    LOG.clear()
    copies.scatter([f.copy for f in arena_frames(pool, Codec.FP8, 0)])
    assert LOG == ["steps records"]
    LOG.clear()
    copies.gather(arena_frames(pool, Codec.FP8, SHAPE.inbound))
    assert LOG == ["steps records", "d2h waits for steps 0", "d2h records"]
    copies.close()
    assert not runtime.registered


@pytest.mark.skipif(torch.cuda.is_available(), reason="real memory can be registered")
def test_memory_that_cannot_be_registered_is_said_and_used(
    runtime: LoggedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.code = 801
    pool = filled_pool("fp8", "fp8", torch.bfloat16, HEAD_DIM, torch.device("cpu"))
    _arena, slots = arena_slots()
    copies = CudaCopyDevice(pool, slots, SHAPE, torch.device("cpu"))
    assert "cudaHostRegister" in caplog.text and "error 801" in caplog.text
    copies.gather(arena_frames(pool, Codec.FP8, SHAPE.inbound))
    assert slots[SHAPE.inbound].any()
    copies.close()


def test_staging_memory_is_three_arena_halves() -> None:
    assert ArenaShape().staging_bytes == 192 << 20
    assert SHAPE.staging_bytes == 8 * ((1 << 16) + 16)
