"""What is installed is what was pinned: every package by version and by hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"([a-z0-9.-]+)==([^\s\\]+)")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?\Z")


def pins(text: str) -> dict[str, str]:
    return {m[1]: m[2] for m in map(PIN.match, text.splitlines()) if m}


@pytest.mark.parametrize(
    "name", ["requirements", "requirements-dev", "requirements-nixl", "requirements-fuzz"]
)
def test_every_pin_has_hashes(name: str) -> None:
    wanted = pins((ROOT / f"{name}.in").read_text())
    locked = (ROOT / f"{name}.txt").read_text()
    assert wanted and pins(locked) == wanted, f"{name}.txt is not that of {name}.in: make lock"
    for block in re.split(r"\n(?=[a-z])", locked)[1:]:
        package, *hashes = block.rstrip("\n").splitlines()
        assert package.endswith(" \\") and hashes, f"{package} has no hash"
        assert all(map(HASH.match, hashes)), f"{package}: what is in its hashes?"
    assert "://" not in locked
    assert "torch" not in wanted, "its build depends on the machine: the Makefile installs it"
