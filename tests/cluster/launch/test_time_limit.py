import signal
import time

import pytest

from cluster.launch.supervisor import time_limit
from protocol.errors import StartupError


def test_time_limit_ends_a_long_call() -> None:
    began = time.monotonic()
    with (
        pytest.raises(StartupError, match=r"Ray did not start within 0\.2 s"),
        time_limit(0.2, "Ray did not start"),
    ):
        time.sleep(10)
    assert time.monotonic() - began < 2


def test_time_limit_restores_the_signal_handler() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(0.2, "it"):
        pass
    assert signal.getsignal(signal.SIGALRM) == before
    time.sleep(0.3)
