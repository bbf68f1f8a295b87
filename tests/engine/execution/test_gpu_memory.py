"""The set-up of a GPU and errors for want of its memory, with the answers of torch.cuda given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.lib.settings import engine_settings
from cluster.models import locate
from cluster.worker import engine_main
from engine.execution import gpu_memory, loading
from engine.execution.build_tools import MissingTool
from engine.execution.gpu_memory import MemoryGuard, prepare_gpu
from engine.memory.memory_footprint import RUNTIME_BYTES, estimate_footprint
from engine.model_config.checkpoint import load_config, read_shards
from engine.scheduling.step_policy import plan_decode_step
from protocol.errors import EngineDied, StartupError

GIB = 1 << 30
GPU = torch.device("cuda", 1)
DEMO = locate.demo_path()
LOST = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class FakeCuda:
    """Two GPUs of 24 GiB, of which ``free`` bytes are free."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: torch.device | None = None
        self.free = 20 * GIB
        self.reserved = 0
        self.limits: list[float] = []
        for name in ("is_available", "device_count", "set_device", "mem_get_info", "empty_cache"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "memory_reserved", lambda _device: self.reserved)
        patch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda f, _device: self.limits.append(f)
        )

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return self.free, 24 * GIB

    def empty_cache(self) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(gpu_memory, "missing_build_tools", lambda: ())
    yield FakeCuda(monkeypatch)
    torch.backends.cuda.enable_cudnn_sdp(had_cudnn)


# ---- set-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_the_named_gpu_is_the_one_of_the_process(cuda: FakeCuda, name: str, index: int) -> None:
    assert prepare_gpu(name) == cuda.current == torch.device("cuda", index)


@pytest.mark.usefixtures("cuda")
def test_cudnn_attention_is_off_on_a_gpu() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    loading.choose_device(engine_settings("", device="cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("cuda")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(StartupError, match=r"cuda:2 .* 2 GPU\(s\); expected cuda:0 to cuda:1"):
        prepare_gpu("cuda:2")


def test_an_engine_without_a_compiler_ends_before_weights_are_loaded(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = (MissingTool("no compiler", "get gcc"), MissingTool("no header", "get it"))
    monkeypatch.setattr(gpu_memory, "missing_build_tools", lambda: missing)
    stages: list[str] = []
    settings = engine_settings(str(DEMO), device="cuda:1")
    says = "^device cuda:1: no compiler; get gcc; no header; get it$"
    with pytest.raises(StartupError, match=says):
        loading.load_engine(settings, plan_decode_step, lambda stage, _done: stages.append(stage))
    assert stages == [] and cuda.current is None


def test_no_gpu_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="torch sees no GPU; use device cpu"):
        prepare_gpu("cuda:1")
    assert loading.choose_device(engine_settings("")) == torch.device("cpu")


# ---- memory ------------------------------------------------------------------------------------


def test_the_pool_is_sized_by_the_share_and_what_the_engine_has_taken(cuda: FakeCuda) -> None:
    shards = read_shards(DEMO)
    plan = estimate_footprint(engine_settings(str(DEMO)), load_config(DEMO), shards, "cuda")
    cuda.reserved = plan.weights
    sizes = [MemoryGuard(GPU, share).size_pool(plan).total for share in (None, 1.0, 0.5)]
    page = plan.kv_bytes_per_token * 32
    assert sizes[0] == sizes[1]
    assert 0.9 * 12 * GIB - page < sizes[2] <= 0.9 * 12 * GIB
    # What torch keeps of freed memory stays within the share of an engine that has one.
    assert cuda.limits == [pytest.approx((12 * GIB - RUNTIME_BYTES["cuda"]) / (24 * GIB))]
    cuda.free = 5 * GIB  # another engine has the rest
    found = MemoryGuard(GPU, 0.5).size_pool(plan)
    assert found.kv + found.workspace <= 5 * GIB
    cuda.reserved = 12 * GIB - RUNTIME_BYTES["cuda"]
    with pytest.raises(StartupError, match=r"does not fit on the GPU .* 5\.0 GiB free"):
        MemoryGuard(GPU, 0.5).size_pool(plan)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "error",
    [
        LOST,
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
)
def test_out_of_memory_names_the_numbers_and_the_keys(error: RuntimeError) -> None:
    guard = MemoryGuard(GPU, 0.5)
    guard.plan = estimate_footprint(engine_settings(""), load_config(DEMO), None, "cuda")
    with pytest.raises(StartupError) as raised, guard.explained(lambda: "warming up"):
        raise error
    for text in (
        "cuda:1 has no memory left (warming up): 24.0 GiB in all, 20.0 GiB free",
        "10.8 GiB for this engine (50% of the GPU",
        *("tokens of KV", "for steps", "worker.kv_tokens", "worker.max_batch"),
        *("worker.prefill_chunk", "model.max_len"),
    ):
        assert text in str(raised.value)


@pytest.mark.usefixtures("cuda")
def test_other_errors_stay_what_they_are() -> None:
    guard = MemoryGuard(GPU, None)
    with pytest.raises(RuntimeError, match="an illegal access"), guard.explained(lambda: ""):
        raise RuntimeError("an illegal access")
    with (
        pytest.raises(torch.OutOfMemoryError),
        MemoryGuard(torch.device("cpu"), None).explained(lambda: ""),
    ):
        raise LOST


def test_a_gpu_that_answers_no_more_does_not_hide_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    says = r"^cuda:1 has no memory left \(a step\)$"
    guard = MemoryGuard(GPU, None)
    with pytest.raises(StartupError, match=says), guard.explained(lambda: "a step"):
        raise LOST


@pytest.mark.parametrize("stage", ["load_weights", "measure_ceilings", "warm_up"])
def test_a_load_that_runs_out_of_memory_says_at_what(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The engine is loaded on the CPU; the guard takes it for one on a GPU."""

    def lose(*_arguments: object) -> None:
        raise LOST

    class GuardOfGpu(MemoryGuard):
        def __init__(self, _device: torch.device, share: float | None) -> None:
            super().__init__(GPU, share)

    cuda.free = GIB
    monkeypatch.setattr(loading, "MemoryGuard", GuardOfGpu)
    monkeypatch.setattr(loading, stage, lose)
    settings = engine_settings(str(DEMO), device="cpu", threads=1, max_batch=1, prefill_chunk=32)
    doing = {"load_weights": "loading weights", "measure_ceilings": "measuring the machine"}
    with pytest.raises(StartupError) as raised:
        loading.load_engine(settings, plan_decode_step, lambda *_: None)
    assert f"({doing.get(stage, 'preparing matrix products')})" in str(raised.value)
    assert "1.0 GiB free" in str(raised.value)


class LoadedEngineOfGpu:
    memory = MemoryGuard(GPU, None)
    ready = grammars = speculation = None

    class engine:  # noqa: N801
        @staticmethod
        def take_role(*_policy: object, drafts: bool) -> None:
            assert drafts


class SilentChannel:
    def send(self, _events: list[object]) -> None:
        pass


def build(folder: Path) -> Callable[[], None]:
    return engine_main.build_server(
        engine_settings(str(folder)),
        SilentChannel(),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        lambda *_: None,
    )


@pytest.mark.usefixtures("cuda")
def test_a_step_that_runs_out_of_memory_ends_the_engine_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class LosingServer:
        def __init__(self, *_arguments: object) -> None:
            pass

        def run(self) -> None:
            raise LOST

    monkeypatch.setattr(loading, "load_engine", lambda *_: LoadedEngineOfGpu)
    monkeypatch.setattr("engine.process.server.EngineServer", LosingServer)
    run = build(tmp_path)
    with pytest.raises(EngineDied, match=r"cuda:1 has no memory left \(running a step\): 20480 of"):
        run()


@pytest.mark.usefixtures("cuda")
def test_no_memory_for_frames_fails_the_start_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose(*_arguments: object) -> None:
        raise LOST

    monkeypatch.setattr(loading, "load_engine", lambda *_: LoadedEngineOfGpu)
    monkeypatch.setattr("engine.process.server.EngineServer", lose)
    says = r"cuda:1 has no memory left \(allocating memory for KV frames\): 20480 of"
    with pytest.raises(StartupError, match=says):
        build(tmp_path)


def test_out_of_memory_is_told_apart_from_other_errors() -> None:
    assert gpu_memory.is_out_of_memory(LOST)
    assert not gpu_memory.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
