"""Children that are killed are replaced, so that the next caller finds one that has started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.common.child_pool import ChildPool


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    found = ChildPool("tests.router.common.sleeping_child", Path("unused"))
    yield found
    found.close()
    assert not found.pids


def test_a_killed_child_is_replaced_at_once(pool: ChildPool) -> None:
    pool.exchange(b"0", 5.0, lambda line: True)
    [first] = pool.pids
    with pytest.raises(TimeoutError):
        pool.exchange(b"60", 0.05, lambda line: True)
    [second] = pool.pids
    assert second != first
    replies: list[bytes] = []

    def keep(line: bytes) -> bool:
        replies.append(line)
        return True

    pool.exchange(b"0", 5.0, keep)
    assert replies == [b'"awake"\n'] and pool.pids == [second]
