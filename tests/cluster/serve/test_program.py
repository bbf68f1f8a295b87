"""The program's fingerprint, and what of a deployment depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.serve.node import PACKAGES, fingerprint


def test_it_is_of_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "some_program"
    package.mkdir()
    (package / "__init__.py").write_text("")
    seen = [fingerprint(("some_program",))]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("data.json", "{}")):
        (package / name).write_text(text)
        seen.append(fingerprint(("some_program",)))
    assert len(set(seen)) == 4
    assert seen[-1] == seen[-2]  # what is no code


def test_it_is_the_same_each_time() -> None:
    assert fingerprint() == fingerprint(PACKAGES)
