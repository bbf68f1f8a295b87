"""The Dockerfile: what goes into the image is all there, and the versions are the Makefile's."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

from tests.deploy.commands import ROOT, check_shell
from tests.test_layout import MAY_IMPORT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORE = (ROOT / ".dockerignore").read_text().splitlines()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRODUCT = {*MAY_IMPORT, "cluster", "bench"}
LAST_STAGE = DOCKERFILE.split("\nFROM ")[-1]


def test_versions_are_the_makefiles() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("TORCH", "UV"):
        [pinned] = re.findall(rf"^{name} := (.*)$", makefile, re.M)
        assert f"ARG {name}={pinned}\n" in DOCKERFILE
    [torch] = re.findall(r"^ARG TORCH=(.*)$", DOCKERFILE, re.M)
    assert f"torch=={torch}" in PROJECT["project"]["dependencies"]


def test_every_package_is_installed() -> None:
    """A wheel has the packages that are listed, and no others."""
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PRODUCT
        for path in (ROOT / package).rglob("__init__.py")
    }
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(find_packages(str(ROOT), include=include)) == found


def test_nothing_else_goes_into_the_image() -> None:
    assert next(line for line in IGNORE if not line.startswith("#")) == "*"
    allowed = {line.removeprefix("!").rstrip("/") for line in IGNORE if line.startswith("!")}
    assert allowed == PRODUCT | {"LICENSE", "README.md", "pyproject.toml", "requirements.txt"}
    for name in allowed:
        assert (ROOT / name).exists(), name


def test_it_is_not_run_by_root() -> None:
    stages = DOCKERFILE.split("\nFROM ")
    assert re.search(r"^USER (\d+):\1$", LAST_STAGE, re.M)
    assert "HEALTHCHECK" not in DOCKERFILE
    assert {stage.split()[0] for stage in stages[1:]} == {"python:3.11-slim-bookworm"}


@pytest.mark.parametrize(("backend", "compiler"), [("cpu", []), ("cu126", ["gcc", "libc6-dev"])])
def test_only_the_image_for_gpus_has_a_compiler(
    backend: str, compiler: list[str], tmp_path: Path
) -> None:
    [first, *_] = re.findall(r"^RUN (.*)$", joined(LAST_STAGE), re.M)
    for name in ("apt-get", "rm", "useradd"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o700)
    environment = {"PATH": str(tmp_path), "TORCH_BACKEND": backend}
    done = subprocess.run(["/bin/sh", "-c", first], env=environment, capture_output=True, text=True)
    [installed] = re.findall(r"^apt-get install .*recommends (.*)$", done.stdout, re.M)
    assert installed.split() == ["tini", "wget", *compiler], done.stderr
    assert "\nuseradd " in done.stdout
    defaults = re.findall(r"^ARG TORCH_BACKEND=(.*)$", DOCKERFILE, re.M)
    assert defaults == ["cpu", "cpu"]  # an ARG is known in its own stage only


def joined(text: str) -> str:
    """Return ``text`` with what goes on after a backslash on one line."""
    return re.sub(r"\\\n\s*", "", text)


def test_commands_of_the_image_exist() -> None:
    text = joined(DOCKERFILE)
    runs = re.findall(r"^RUN (.*)$", text, re.M)
    assert len(runs) >= 4
    for run in runs:
        check_shell(run)
    assert "--require-hashes -r /src/requirements.txt" in text
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (ROOT / Path(source)).exists(), source
