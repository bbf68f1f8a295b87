"""`baton down`: stops a cluster on this machine, whatever state it is in."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from cluster.local.run_state import ClusterHome, others_text

_POLL_S = 0.05
_KILL_S = 10.0


def down(cluster: str, drain_s: float, say: Callable[[str], None]) -> int:
    """Stop the cluster and return the exit status: 0 when nothing is left running.

    That includes a cluster that did not run. ``say`` prints a line."""
    home = ClusterHome(cluster)
    began = time.monotonic()
    if home.running() and not _stop(home, drain_s, say):
        say(f"cluster {cluster!r} could not be stopped: see {home.log}")
        return 1
    was_there = home.read() is not None
    killed = home.clean()
    if killed:
        say(f"killed {killed} processes that an earlier run left behind")
    elapsed = time.monotonic() - began
    absent = f"was not running{others_text(cluster)}"
    done = f"is down ({elapsed:.1f} s)" if was_there or elapsed > 1 else absent
    say(f"cluster {cluster!r} {done}; no process is left")
    return 0


def _stop(home: ClusterHome, drain_s: float, say: Callable[[str], None]) -> bool:
    """Drain, then stop at once, then kill; return whether the lock is free."""
    if not _signal_guardian(home, signal.SIGTERM, wait_s=5.0):
        # It was killed, or has not started: the supervisor stops everything by itself.
        say("the guardian process is gone; waiting for the supervisor to end")
    else:
        say(f"draining: running requests have {drain_s:.0f} s to finish")
    if _wait(home, drain_s + 2 * _KILL_S):
        return True
    say("the cluster did not end in time; stopping it at once")
    _signal_guardian(home, signal.SIGTERM)
    if _wait(home, _KILL_S):
        return True
    say("it still runs; killing all its processes")
    state = home.read()
    if state is not None:
        for process in (state.guardian, state.supervisor):
            if process is not None:
                process.signal(signal.SIGKILL)
    return _wait(home, _KILL_S)


def _signal_guardian(home: ClusterHome, number: signal.Signals, wait_s: float = 0.0) -> bool:
    """Signal the guardian; wait ``wait_s`` for a start that has not written its pid yet."""
    end = time.monotonic() + wait_s
    while True:
        state = home.read()
        if state is not None and state.guardian is not None:
            return state.guardian.signal(number)
        if time.monotonic() >= end or not home.running():
            return False
        time.sleep(_POLL_S)


def _wait(home: ClusterHome, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while home.running():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True
