"""The limit of open files: raised to the hard one in a process that starts, and shared out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protocol.descriptor_limit import connections_within, descriptors_for, reachable_limit

UNLIMITED = -1


@pytest.mark.parametrize(("soft", "hard", "after"), [(100, 300, 300), (300, 300, 300)])
def test_soft_limit_becomes_the_hard_one(soft: int, hard: int, after: int) -> None:
    """In a process of its own, because a hard limit cannot be raised again."""
    code = (
        "import resource; from protocol.descriptor_limit import raise_descriptor_limit;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"{after} ({after}, {hard})"


def test_what_a_process_can_reach() -> None:
    assert reachable_limit(1024, 4096) == 4096
    assert reachable_limit(1024, 10**9) == 1 << 20
    assert reachable_limit(10**7, 10**9) == 10**7, "it is never lowered"
    assert reachable_limit(1024, UNLIMITED) == reachable_limit(UNLIMITED, UNLIMITED) == 1 << 20


def test_part_of_the_descriptors_stays_for_everything_else() -> None:
    assert [connections_within(n) for n in (100, 256, 1024, 65536)] == [50, 128, 768, 57344]
    for connections in (0, 100, 8192, 100_000):
        assert connections_within(descriptors_for(connections)) >= connections
    assert descriptors_for(8192) == 10240
