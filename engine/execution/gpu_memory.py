"""The GPU of one engine: how it is set up, its share of the memory, and errors for want of memory.

``load_engine`` calls it, and the engine process runs its loop under ``MemoryGuard.explained``. The
arithmetic is in ``memory_footprint``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from engine.execution.build_tools import missing_build_tools
from engine.memory.memory_footprint import (
    RUNTIME_BYTES,
    Footprint,
    GpuMemory,
    gpu_footprint,
    gpu_memory_text,
)
from protocol.errors import BatonError, StartupError

_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
"""What errors of CUDA and of its libraries say that have no type of their own in torch."""


def prepare_gpu(name: str) -> torch.device:
    """Make the GPU ``name`` (cuda or cuda:N) the one of this process and return it with its index.
    Raise StartupError if torch does not see it, or if Triton cannot launch kernels."""
    wanted = torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise StartupError(f"device {name} was asked for, but torch sees no GPU; use device cpu")
    index = wanted.index or 0
    if index >= count:
        raise StartupError(
            f"device {name} was asked for, but torch sees {count} GPU(s); expected cuda:0"
            + (f" to cuda:{count - 1}" if count > 1 else "")
        )
    if missing := missing_build_tools():
        raise StartupError(f"device {name}: " + "; ".join(map(str, missing)))
    device = torch.device("cuda", index)
    # Kernels, streams and allocations that name no device would use GPU 0 otherwise.
    torch.cuda.set_device(device)
    # On sm90 cuDNN ranks first among torch's attention kernels, and builds a plan for each new
    # shape, which takes 23 to 37 ms. Decoding has a new shape whenever a sequence gets a page.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def read_gpu_memory(device: torch.device, share: float) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, share=share)


class MemoryGuard:
    """Knows what an engine takes of its GPU, and says so when memory runs out. The loader creates
    one for each engine; on a CPU it does nothing."""

    def __init__(self, device: torch.device, share: float | None) -> None:
        self._device = device
        self._share = share or 1.0
        self.plan: Footprint | None = None  # None: not estimated yet, or on a CPU

    def size_pool(self, plan: Footprint) -> Footprint:
        """Return ``plan`` with the KV pool that an engine gets whose weights are loaded. Raise
        StartupError with the numbers if it does not fit."""
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_reserved(self._device) + RUNTIME_BYTES["cuda"]
        gpu = read_gpu_memory(self._device, self._share)
        self.plan = gpu_footprint(plan, gpu, taken)
        self._limit_torch(gpu)
        return self.plan

    def _limit_torch(self, gpu: GpuMemory) -> None:
        """Let torch free what it keeps unused before it exceeds the engine's share. Otherwise it
        would do so only where the whole GPU is full, at the expense of the other engines."""
        if gpu.share < 1.0:
            most = gpu.total * gpu.share - RUNTIME_BYTES["cuda"]
            torch.cuda.set_per_process_memory_fraction(most / gpu.total, self._device)

    @contextlib.contextmanager
    def explained(
        self, doing: Callable[[], str], error: type[BatonError] = StartupError
    ) -> Iterator[None]:
        """Raise ``error`` with the numbers in place of torch's out-of-memory errors. ``doing`` says
        what the engine was doing."""
        try:
            yield
        except RuntimeError as cause:
            if self._device.type != "cuda" or not is_out_of_memory(cause):
                raise
            raise error(self._text(doing())) from cause

    def _text(self, doing: str) -> str:
        text = f"{self._device} has no memory left ({doing})"
        with contextlib.suppress(RuntimeError):  # CUDA may answer nothing after an error
            gpu = read_gpu_memory(self._device, self._share)
            if self.plan is not None:
                return f"{text}: {gpu_memory_text(gpu, self.plan)}"
            return f"{text}: {gpu.free >> 20} of {gpu.total >> 20} MiB are free"
        return text


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch or CUDA is for want of memory on the GPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in str(error) for sign in _OUT_OF_MEMORY
    )
