"""A test that wants more of the machine skips with a reason, or fails where it must run."""

import pytest

from tests.system import REQUIRED, lacking, needs, program


def test_what_is_there_is_found() -> None:
    assert program("sh").endswith("/sh")
    assert lacking("sh") == ""
    needs("sh")


def test_what_is_missing_is_named_with_its_package() -> None:
    assert "no-such-program" in lacking("sh", "no-such-program")
    with pytest.raises(LookupError, match="apt-get install no-such-program"):
        program("no-such-program")


def test_a_missing_program_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program"):
        needs("no-such-program")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        needs("no-such-program")


def test_who_must_be_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "run as root" in lacking("sh", root=True)
