"""The product does without `bench`, and the commands of docs/benchmarks.md exist."""

from __future__ import annotations

import re

import pytest

from tests.folders import PRODUCT, ROOT
from tests.test_layout import imports

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
