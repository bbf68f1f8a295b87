"""Kernels run natively where there is a GPU, and elsewhere under Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported: ``tests/conftest.py`` sets it.
"""

from __future__ import annotations

import pytest
import torch

from engine.execution.prompt_graphs import PromptGraphs
from engine.kernels import recording


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels' tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def few_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record steps with prompts for few rows: the interpreter computes those beyond the prompt's,
    too."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(recording, "PROMPT_ROWS", (16, 40))


@pytest.fixture
def only_decode_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute steps with prompts without graphs, likewise; test_prompt_graphs.py has those."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(PromptGraphs, "size_for", lambda *_: None)
