"""What Triton lacks to compile its C module, on machines with and without each part of it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from engine.execution.build_tools import missing_build_tools


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty path, and an empty folder for headers."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    paths = {"include": str(tmp_path / "include")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda _scheme: paths)
    return tmp_path


def add_program(machine: Path, name: str) -> Path:
    path = machine / "bin" / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o700)
    return path


def test_compiler_and_header_are_named_with_their_packages(machine: Path) -> None:
    compiler, header = missing_build_tools()
    assert "no C compiler" in compiler.text and "gcc and libc6-dev" in compiler.remedy
    assert f"{machine}/include/Python.h" in header.text
    assert "python3-dev" in header.remedy
    version = ".".join(map(str, sys.version_info[:2]))
    assert f"python{version}-dev" in header.remedy


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_nothing_is_missing_with_a_compiler_and_the_header(machine: Path, name: str) -> None:
    (machine / "include" / "Python.h").touch()
    add_program(machine, name)
    assert missing_build_tools() == ()


def test_cc_replaces_the_compilers_on_the_path(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "include" / "Python.h").touch()
    program = add_program(machine, "my-cc")
    for chosen in ("my-cc", str(program)):
        monkeypatch.setenv("CC", chosen)
        assert missing_build_tools() == ()
    add_program(machine, "gcc")  # which Triton does not look for if CC is set
    for chosen in ("icc", ""):
        monkeypatch.setenv("CC", chosen)
        [found] = missing_build_tools()
        assert f"CC is {chosen!r}" in found.text and "unset CC" in found.remedy


def test_headers_of_debians_python_are_not_below_usr_local(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_program(machine, "gcc")
    asked: list[str] = []

    def paths(scheme: str) -> dict[str, str]:
        asked.append(scheme)
        return {"include": str(machine)}

    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(sysconfig, "get_paths", paths)
    assert len(missing_build_tools()) == 1
    assert asked == ["posix_prefix"]


def test_module_needs_no_package() -> None:
    """The check of the GPU benchmark uses it where packages are missing."""
    code = "import sys; sys.path.insert(0, '.'); import engine.execution.build_tools"
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=root, check=True)
