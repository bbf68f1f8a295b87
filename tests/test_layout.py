"""Folders are small, imports point one way, and fronts and router run without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.folders import folder_of, graph, sources

ROOT = Path(__file__).parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "engine": {"protocol"},
    "kvtransfer": {"protocol", "engine"},
    "prefill_worker": {"protocol", "engine", "kvtransfer"},
    "decode_worker": {"protocol", "engine", "kvtransfer"},
    "router": {"protocol"},
}

MODULES_AT_MOST = 15

TORCH_FREE = [
    "router.http.app",
    "cluster.worker.worker",
    "cluster.cli.main",
    "engine.process.client",
    "kvtransfer.prefill_call",
    "kvtransfer.carriers.local_carrier",
    "kvtransfer.carriers.tcp_carrier",
    "prefill_worker.service",
    "decode_worker.service",
]


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    ours = {*MAY_IMPORT, "cluster", "bench", "tests"}
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        foreign = (imports(path) & ours) - MAY_IMPORT[package] - {package}
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_fronts_and_router_do_without_torch(module: str) -> None:
    check = (
        f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


def test_no_pickle_on_any_wire() -> None:
    for package in [*MAY_IMPORT, "cluster"]:
        for path in (ROOT / package).rglob("*.py"):
            unsafe = imports(path) & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
            assert not unsafe, f"{path.relative_to(ROOT)} imports {sorted(unsafe)}"


def test_what_is_installed_is_what_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = find_packages(
        str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"]
    )
    files = [p for top in {*MAY_IMPORT, "cluster", "bench"} for p in (ROOT / top).rglob("*.py")]
    assert set(listed) == {".".join(path.parent.relative_to(ROOT).parts) for path in files}


def test_folders_import_what_they_declare() -> None:
    declared = tomllib.loads((ROOT / "tests" / "folders.toml").read_text())
    found = {folder: sorted(imports) for folder, imports in graph().items()}
    assert found == declared, "python -m tests.folders prints what the code has"


def test_no_folders_import_each_other_in_a_circle() -> None:
    TopologicalSorter(graph()).prepare()  # raises CycleError


def test_no_folder_holds_more_than_fifteen_modules() -> None:
    held = Counter(
        folder_of(path)
        for path in [*sources().values(), *(ROOT / "bench").rglob("*.py")]
        if "_pb2" not in path.name
    )
    assert not {folder: count for folder, count in held.items() if count > MODULES_AT_MOST}
