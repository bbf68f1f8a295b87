"""Kernels run natively where there is a GPU, and elsewhere under Triton's interpreter on the CPU.

Triton reads the variable when a kernel is decorated, so it is set before any kernel is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels' tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
