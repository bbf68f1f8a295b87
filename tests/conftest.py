"""What all tests run under: one thread of torch, a Hypothesis profile, Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported anywhere: its threads spin at barriers, and on a shared machine a second
# one makes small models slower by an order of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is imported anywhere: without a GPU its interpreter runs kernels on the CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONG = {"e2e", "engine", "simulation", "workers"}
"""Folders whose files take longest."""

# `make test` draws few examples, the same ones in every run; `make test-long` draws many new ones.
_common = settings(
    deadline=None,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile("commit", _common, max_examples=40, derandomize=True)
settings.register_profile("long", _common, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "commit"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no process works alone on one of them at the end."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))
