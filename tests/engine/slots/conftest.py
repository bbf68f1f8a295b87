"""Frames and texts that the tests of this folder compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.execution.engine import Engine
from engine.ipc import messages as m
from tests.engine.conftest import drain, request
from tests.engine.slots.served import PROMPT, prefill_frames, serving, shape_of

MakeEngine = Callable[..., Engine]


@pytest.fixture
def expected(make_engine: MakeEngine) -> list[int]:
    engine = make_engine()
    engine.generate(1, request("1", PROMPT))
    return drain(engine)[1]


@pytest.fixture
def sent(make_engine: MakeEngine, tiny_folder: Path) -> list[tuple[m.KVFrame, bytes]]:
    """The frames of PROMPT, as a prefill worker sends them."""
    engine = make_engine()
    with serving(engine, tiny_folder, shape_of(engine)) as prefill:
        return prefill_frames(prefill, 1)
