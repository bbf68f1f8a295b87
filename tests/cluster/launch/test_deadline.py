import signal
import time

import pytest

from cluster.launch.supervisor import deadline
from protocol.errors import StartupError


def test_what_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    with (
        pytest.raises(StartupError, match=r"Ray did not start within 0\.2 s"),
        deadline(0.2, "Ray did not start"),
    ):
        time.sleep(10)
    assert time.monotonic() - began < 2


def test_what_is_done_in_time_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with deadline(0.2, "it"):
        pass
    assert signal.getsignal(signal.SIGALRM) == before
    time.sleep(0.3)
