"""Which ``Host`` headers name this server."""

from __future__ import annotations

import pytest

from protocol.security.host_header import AllowedHosts


@pytest.mark.parametrize(
    "header",
    [
        *(b"localhost", b"LocalHost:8000", b"localhost.:80", b"127.0.0.1", b"127.0.0.1:8000"),
        *(b"[::1]", b"[::1]:8000", b"10.1.2.3:80", b"gpu1", b"Baton.Example:443"),
    ],
)
def test_own_names_and_addresses_are_permitted(header: bytes) -> None:
    assert AllowedHosts(("gpu1", "baton.example")).permit(header)


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b":80", b"evil.example", b"evil.example:8000", b"localhost.evil.example"),
        *(b"127.0.0.1.evil.example", b"evil.example#127.0.0.1", b"user@localhost", b"[::1", b"::1"),
        *(b"localhost:80:80", b"localhost, evil.example", b"127.0.0.1/x", b"\xff\x00", b"gpu1"),
        *(b"2130706433.", b"a" * 100_000),
    ],
)
def test_other_names_are_not(header: bytes) -> None:
    assert not AllowedHosts().permit(header)
