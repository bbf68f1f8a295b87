"""What a device can do at most, measured: close to what its maker says, and quickly."""

from __future__ import annotations

import time

import torch

from engine.execution.machine_ceilings import measure_ceilings
from engine.ipc.settings import MachineCeilings


def test_ceilings_are_those_of_such_a_device(device: str) -> None:
    began = time.perf_counter()
    found = measure_ceilings(MachineCeilings(), torch.device(device), torch.bfloat16, 1 << 30)
    assert time.perf_counter() - began < 5.0
    flops, bytes_ = (1e13, 2e11) if device == "cuda" else (1e8, 1e8)
    assert flops < found.flops < 1e16
    assert bytes_ < found.bytes < 1e14
