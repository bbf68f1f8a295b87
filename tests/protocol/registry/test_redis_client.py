"""Which Redis may be used: one on this machine, or one that asks who comes."""

from __future__ import annotations

import logging

import pytest

from protocol.errors import StartupError
from protocol.registry.redis_client import check_exposure


@pytest.mark.parametrize(
    "url",
    [
        *("redis://localhost", "redis://127.0.0.1:6379/0", "redis://[::1]:1", "unix:///x.sock"),
        *("rediss://:pw@10.0.0.5:6379/0", "rediss://10.0.0.5?ssl_certfile=a&ssl_keyfile=b"),
    ],
)
def test_fine(url: str, caplog: pytest.LogCaptureFixture) -> None:
    check_exposure(url)
    assert not caplog.records


@pytest.mark.parametrize("url", ["redis://10.0.0.5", "redis://r.example:1/0", "rediss://10.0.0.5"])
def test_open_to_everybody(url: str) -> None:
    with pytest.raises(StartupError, match="must require a password"):
        check_exposure(url)


def test_a_password_in_the_clear(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for url in ("redis://:hunter2@10.0.0.5:1", "redis://10.0.0.5?password=hunter2"):
        check_exposure(url)
    assert len(caplog.records) == 2
    assert "is not encrypted" in caplog.text and "hunter2" not in caplog.text
