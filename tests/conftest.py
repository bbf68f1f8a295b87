"""What every test runs under."""

from __future__ import annotations

import os

import pytest

# Before torch is imported anywhere: its threads spin at barriers, and on a shared machine a second
# one makes small models slower by an order of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = {"e2e", "engine", "workers"}
"""Folders whose files take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They begin first: none is left for one process at the end while the others have nothing."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))
