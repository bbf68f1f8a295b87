"""docs/reliability.md names only tests that exist, and one for every promise."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@cache
def functions(path: str) -> set[str]:
    found = ast.walk(ast.parse((ROOT / path).read_text()))
    return {n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) >= 20
    assert not [f"{path}::{name}" for path, name in NAMED if not (ROOT / path).exists()]
    assert not [f"{path}::{name}" for path, name in NAMED if name not in functions(path)]


def test_every_promise_has_a_test() -> None:
    survived, _, _ = PAGE.partition("## Faults that are not survived")
    rows = [line for line in survived.splitlines() if re.match(r"\| (?!fault )", line)]
    assert len(rows) >= 20
    assert not [row for row in rows if "::" not in row]
