"""Numbers of the host on the device and back, with as few waits for it as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Return ``values`` [n] or [m, n] as int64 on ``device``, with the same shape.

    A copy from ordinary memory to a GPU waits for all work before it. Pinned memory is copied in
    stream order instead; torch keeps it until the copy is done.
    """
    host = torch.as_tensor(values, dtype=torch.int64)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_parts(parts: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Return ``parts`` [n] each on ``device`` as views of a single copy."""
    whole = upload(np.concatenate(parts), device)
    return list(whole.split([len(part) for part in parts]))


def read_back(*tensors: Tensor) -> list[list[Any]]:
    """Return ``tensors``, of one device, as lists of numbers, after one wait for the device."""
    device = tensors[0].device
    if device.type != "cpu":
        # Without blocking, torch copies into pinned memory, so that the copies need no wait each.
        tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        torch.cuda.current_stream(device).synchronize()
    return [tensor.tolist() for tensor in tensors]
