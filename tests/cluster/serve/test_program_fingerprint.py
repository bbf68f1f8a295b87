"""The program's fingerprint, and what of a deployment depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.serve.node_settings import PACKAGES, program_fingerprint


def test_fingerprint_depends_on_names_and_contents_of_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "some_program"
    package.mkdir()
    (package / "__init__.py").write_text("")
    seen = [program_fingerprint(("some_program",))]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("data.json", "{}")):
        (package / name).write_text(text)
        seen.append(program_fingerprint(("some_program",)))
    assert len(set(seen)) == 4
    assert seen[-1] == seen[-2]  # what is no code


def test_fingerprint_is_stable() -> None:
    assert program_fingerprint() == program_fingerprint(PACKAGES)
