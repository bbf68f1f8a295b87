"""Kernels run natively where there is a GPU, and elsewhere under Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported: ``tests/conftest.py`` sets it.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels' tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
