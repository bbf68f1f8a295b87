from __future__ import annotations

import pytest

from kvtransfer.codec_choice import LAST, LEAST_BYTES, Tails


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.came = 0
        self.tails = Tails(lambda: self.now)

    def tail(self, nbytes: int, seconds: float) -> None:
        with self.tails.waiting(lambda: self.came):
            self.now += seconds
            self.came += nbytes


def test_the_best_of_the_last_tails_is_the_link() -> None:
    world = World()
    assert world.tails.best is None
    world.tail(LEAST_BYTES - 1, 1e-6)  # a latency
    assert world.tails.best is None
    world.tail(10 << 20, 1.0)
    world.tail(5 << 20, 1.0)
    assert world.tails.best == pytest.approx(10 << 20)
    for _ in range(LAST):
        world.tail(1 << 20, 1.0)
    assert world.tails.best == pytest.approx(1 << 20), "a link that has become slower"


def test_all_who_wait_count_while_they_wait() -> None:
    world = World()
    first, second = (world.tails.waiting(lambda: 0) for _ in range(2))
    with first:
        world.now = 1.0
        with second:
            world.now = 3.0
            assert world.tails.seconds == 1.0 + 2 * 2.0
        world.now = 4.0
    world.now = 9.0
    assert world.tails.seconds == 6.0, "as long as they wait"
    with pytest.raises(ValueError, match="broke"), world.tails.waiting(lambda: 1 << 30):
        raise ValueError("broke")
    assert world.tails.best is None, "what broke tells nothing of the link"
