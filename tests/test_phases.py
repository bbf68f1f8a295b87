"""What is marked ``alone`` runs in a phase of `make test` of its own, which must find it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_make_looks_where_tests_are_that_run_alone() -> None:
    [folders] = re.findall(r"^ALONE := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    marked = [p for p in (ROOT / "tests").rglob("*.py") if "mark.alone" in p.read_text()]
    marked.remove(Path(__file__))
    assert len(marked) > 5
    for path in marked:
        assert any(path.is_relative_to(ROOT / folder) for folder in folders.split()), path
