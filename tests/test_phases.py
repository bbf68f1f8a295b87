"""Tests marked ``alone`` or ``system`` run in phases of their own, which must find them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_make_looks_in_the_folders_of_tests_that_run_alone() -> None:
    [folders] = re.findall(r"^APART := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    marked = [
        p
        for p in (ROOT / "tests").rglob("*.py")
        if re.search(r"mark\.(alone|system)", p.read_text())
    ]
    assert len(marked) > 5
    for path in marked:
        assert any(path.is_relative_to(ROOT / folder) for folder in folders.split()), path
