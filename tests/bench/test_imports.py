"""The product does without `bench`, and the commands of docs/benchmarks.md exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.test_layout import imports

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "protocol",
    "engine",
    "kvtransfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
)
COMMANDS = sorted(
    {
        name
        for page in (ROOT / "docs").glob("benchmarks*.md")
        for name in re.findall(r"python -m (bench[\w.]*)", page.read_text())
    }
)


@pytest.mark.parametrize("package", PRODUCT)
def test_the_product_imports_no_benchmark(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert "bench" not in imports(path), path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_the_page_exist(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    module = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert "def main(" in module.read_text()


def test_no_folder_of_benchmarks_is_crowded() -> None:
    folders = Counter(path.parent for path in (ROOT / "bench").rglob("*.py"))
    assert max(folders.values()) <= 15
