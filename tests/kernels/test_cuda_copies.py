"""``CudaCopies`` with real streams on a GPU; without one, with streams that keep a log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ipc.shared_memory import Arena, ArenaShape
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.kv_cache.kv_frames import FrameCopy, FrameDefect
from engine.kv_cache.kv_pool import KVPool
from engine.slots.cuda_copies import COPY_PRIORITY, CudaCopies
from engine.slots.devices import HostFrame, arena_slots
from tests.kernels.test_kv_copy import LAYERS, PAGES, POOLS, empty_pool, filled_pool

SHAPE = ArenaShape(slot_bytes=(1 << 16) + 8, inbound=3, outbound=2)
PIECES = [(KVPiece(0, 4, 0, 1), [6]), (KVPiece(1, 2, 1, 2), [9, 0])]
HEAD_DIM = 32


class LoggedStream:
    """A stream that runs everything at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")


class LoggedEvent:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking

    def record(self) -> None:
        self._name = current[-1].name
        LOG.append(f"{current[-1].name} records")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self._name}")


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
    names = iter(("inbound", "writing", "outbound"))

    def stream(_device: torch.device, priority: int) -> LoggedStream:
        assert priority == COPY_PRIORITY < 0
        return LoggedStream(next(names))

    empty = torch.empty

    @contextlib.contextmanager
    def use(stream: LoggedStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory and not isinstance(args[0], int):  # not private memory
            LOG.append(f"{current[-1].name} reads back")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", LoggedEvent)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: LOG.append("host waits"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: logged)
    set_device = lambda device: LOG.append(f"the thread is on {device}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return logged


def new_arena() -> tuple[Arena, Tensor]:
    arena = Arena.create(SHAPE)
    return arena, arena_slots(arena)


def host_frames(slots: Tensor, pool: KVPool, codec: Codec, first: int) -> list[HostFrame]:
    """Return PIECES in the slots of the arena from ``first`` on, and in staging slots from 0 on."""
    return [
        HostFrame(
            slots[first + i][: pool.format.piece_bytes(piece, codec)],
            FrameCopy(i, piece, pages, codec),
        )
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
    arena, slots = new_arena()
    copies = CudaCopies(source, arena, device)
    assert torch.equal(values(source, device), before), "compiling changes nothing"
    outgoing = host_frames(slots, source, codec, SHAPE.inbound)
    done = copies.gather(outgoing)
    done.wait()
    assert done.is_done()
    expected = torch.zeros(1 << 17, dtype=torch.uint8)
    for data, copy in outgoing:
        assert source.read(copy.piece, copy.pages, expected, codec) == len(data)
        assert torch.equal(data, expected[: len(data)])
    copies.close()

    arriving = [
        HostFrame(data.clone(), copy._replace(slot=2 - i, pages=()))  # a warm-up uses the slots
        for i, (data, copy) in enumerate(outgoing)
    ]
    target = empty_pool(precision, storage, torch.bfloat16, HEAD_DIM, device)
    copies = CudaCopies(target, arena, device) if device.type == "cuda" else copies
    copies._pool = target
    fetch = copies.fetch(arriving)
    fetch.wait()
    assert fetch.is_done() and list(fetch.defects()) == [0, 0]
    scattered = [copy._replace(slot=2 - i) for i, (_, copy) in enumerate(outgoing)]
    for frame in scattered:
        copies.scatter(frame)
    for _, piece, pages, _ in scattered:
        layers = slice(piece.layer, piece.layer + piece.layers)
        assert torch.equal(values(target, device)[layers, pages], before[layers, pages])
        assert before[layers, pages].any()
    assert not values(target, device)[:, 3].any()
    copies.close()


def test_defects_are_reported_in_the_order_of_the_frames(
    runtime: LoggedRuntime, device: torch.device
) -> None:
    pool = filled_pool("fp8", "fp8", torch.bfloat16, HEAD_DIM, device)
    arena, slots = new_arena()
    copies = CudaCopies(pool, arena, device)
    frames = host_frames(slots, pool, Codec.FP8, 0)
    slots[1, 5] = 0xFF
    fetch = copies.fetch(frames)
    fetch.wait()
    assert list(fetch.defects()) == [0, int(FrameDefect.NAN_BYTE)]
    copies.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="real streams keep no log")
def test_no_copy_is_on_the_stream_of_the_steps(runtime: LoggedRuntime) -> None:
    pool = filled_pool("fp8", "fp8", torch.bfloat16, HEAD_DIM, torch.device("cpu"))
    arena, slots = new_arena()
    copies = CudaCopies(pool, arena, torch.device("cpu"))
    assert runtime.registered == {arena_address(arena): SHAPE.bytes}
    assert LOG[:3] == ["host waits", "outbound records", "host waits for outbound"]  # the warm-up
    LOG.clear()
    frames = host_frames(slots, pool, Codec.FP8, 0)
    copies.fetch(frames).defects()
    assert LOG == ["inbound reads back", "inbound records"]
    LOG.clear()
    copies.scatter(frames[0].copy)
    assert LOG == ["writing records", "host waits for writing"], "it returns when KV is there"
    LOG.clear()
    copies.gather(host_frames(slots, pool, Codec.FP8, SHAPE.inbound))
    assert LOG == ["outbound records"]
    LOG.clear()
    copies.fence()
    assert LOG == ["steps records"]
    LOG.clear()
    copies.bind_thread()
    assert LOG == ["the thread is on cpu"]
    copies.close()
    assert not runtime.registered


def arena_address(arena: Arena) -> int:
    return torch.frombuffer(arena.map, dtype=torch.uint8).data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="real memory can be registered")
def test_memory_that_cannot_be_registered_is_said_and_used(
    runtime: LoggedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.code = 801
    pool = filled_pool("fp8", "fp8", torch.bfloat16, HEAD_DIM, torch.device("cpu"))
    arena, slots = new_arena()
    copies = CudaCopies(pool, arena, torch.device("cpu"))
    assert "cudaHostRegister" in caplog.text and "error 801" in caplog.text
    copies.gather(host_frames(slots, pool, Codec.FP8, SHAPE.inbound))
    assert slots[SHAPE.inbound].any()
    copies.close()


def test_staging_memory_is_bounded() -> None:
    assert ArenaShape().staging_bytes == 128 << 20
    assert SHAPE.staging_bytes == 5 * ((1 << 16) + 16)
    assert ArenaShape().pinned_bytes == ArenaShape().bytes + (64 << 20)
