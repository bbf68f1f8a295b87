"""Measures what the machine can do at most, in moments while an engine is loaded.

    compute     a product of square matrices in the model's type, multiplied the engine's way
    bandwidth   reading a tensor as large as the weights, or a part of them that exceeds the caches;
                weights that fit into a cache are measured against the cache

The fastest of several repeats counts, because any disturbance makes a repeat slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.ipc.settings import MachineCeilings
from engine.model.linear import make_linear

REPEATS = 4
_SQUARE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices; larger ones reach no more FLOPs per second (measured)."""
_READ_BYTES = {"cpu": (8 << 20, 64 << 20), "cuda": (64 << 20, 1 << 30)}
"""Minimum and maximum of the bytes read."""


def measure_ceilings(
    declared: MachineCeilings, device: torch.device, dtype: torch.dtype, weight_bytes: int
) -> MachineCeilings:
    """Return ``declared``, with measured values in place of unknown ones."""
    found = MachineCeilings(
        flops=declared.flops or _flops(device, dtype),
        bytes=declared.bytes or _bytes(device, weight_bytes),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the pool needs the memory of the measurement
    return found


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    n = _SQUARE[device.type]
    weight = torch.rand(n, n, device=device).to(dtype)
    rows, product = weight.clone(), make_linear(weight)
    return 2.0 * n**3 / _quickest(lambda: product(rows), device)


def _bytes(device: torch.device, weight_bytes: int) -> float:
    least, most = _READ_BYTES[device.type]
    if device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(device)[0] // 4)
    count = min(most, max(least, weight_bytes)) // 4
    values = torch.ones(count, device=device)
    read = 4 * count / _quickest(values.sum, device)
    if device.type == "cpu":
        return read
    copy = torch.empty_like(values)  # a sum does not reach the bandwidth of a GPU
    return max(read, 8 * count / _quickest(lambda: copy.copy_(values), device))


def _quickest(run: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds of the fastest run."""
    run()
    timed = _events if device.type == "cuda" else _clock
    return max(1e-9, min(timed(run) for _ in range(REPEATS)))


def _clock(run: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _events(run: Callable[[], Tensor]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
