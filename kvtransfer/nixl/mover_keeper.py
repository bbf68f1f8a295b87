"""Starts a worker's mover when it is first needed, and another one when it was lost.

none --needed--> starting --MoverReady--> serving --lost--> none
  +<-------------- RestartDelay ---------------------------+
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from engine.ipc.shared_memory import ArenaShape
from engine.process.session import EngineSession
from kvtransfer.nixl.mover_process import ArenaRegion, MoverProcess, spawn_mover
from protocol.errors import CarrierFailed

log = logging.getLogger("baton.kv")

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0

PROVEN_S = 20.0
"""A mover that has lived for so long, or has read a frame, was no failure to start."""

_SESSION_CHECK_S = 0.5


class RestartDelay:
    """When the next mover may be started: at once after one that was of use, else later each
    time."""

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._not_before = 0.0

    def lost(self, now: float, proven: bool) -> None:
        if proven:
            self._delay_s = 0.0
        else:
            self._delay_s = min(MAX_DELAY_S, max(FIRST_DELAY_S, 2 * self._delay_s))
        self._not_before = now + self._delay_s

    def may_start(self, now: float) -> bool:
        return now >= self._not_before


class MoverKeeper:
    """Owns one of a worker's movers and its successors. ``NixlCarrier`` creates it. Event loop
    only."""

    def __init__(
        self,
        command: Sequence[str],
        region: Callable[[ArenaShape], ArenaRegion],
        env: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._region = region
        self._env = env
        self._clock = clock
        self._delay = RestartDelay()
        self._session: EngineSession | None = None
        self._mover: MoverProcess | None = None
        self._following: set[asyncio.Task[None]] = set()
        self._closed = False

    def may_serve(self) -> bool:
        """Return whether a mover serves, or one may be started now."""
        if self._mover is not None:
            return self._mover.alive
        return self._delay.may_start(self._clock())

    def ready(self, session: EngineSession) -> MoverProcess | None:
        """Return the mover of this session's arena if it serves; start one otherwise."""
        try:
            mover = self._started(session)
        except CarrierFailed as error:
            log.debug("no NIXL mover: %s", error)
            return None
        return mover if mover.is_ready() else None

    async def wait_ready(self, session: EngineSession) -> MoverProcess:
        """Return the mover of this session's arena when it serves. Raises CarrierFailed."""
        mover = self._started(session)
        await mover.opened()
        return mover

    async def close(self) -> None:
        """End the mover, and wait until no process is left."""
        self._closed = True
        if self._mover is not None:
            self._mover.end("the worker ends")
        if self._following:
            await asyncio.wait(self._following)

    def _started(self, session: EngineSession) -> MoverProcess:
        """Return the mover of this session, which may still be starting. Raises CarrierFailed."""
        if not session.alive or self._closed:
            raise CarrierFailed("NIXL serves no engine that has ended")
        if self._mover is not None and self._session is not session:
            self._mover.end("its engine has been replaced")
            self._mover = None
        if self._mover is None:
            self._mover = self._start(session)
            self._session = session
        if not self._mover.alive:
            raise CarrierFailed("the NIXL mover has just ended")
        return self._mover

    def _start(self, session: EngineSession) -> MoverProcess:
        if not self._delay.may_start(self._clock()):
            raise CarrierFailed("NIXL failed a moment ago, and is started again later")
        region = self._region(session.arena.shape)
        mover = spawn_mover(self._command, session.arena.fd, region, self._env)
        task = asyncio.create_task(self._follow(session, mover), name="nixl-keeper")
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return mover

    async def _follow(self, session: EngineSession, mover: MoverProcess) -> None:
        """Stay with a mover until it is gone; end it when its engine has ended."""
        started = self._clock()
        while not await mover.lost_within(_SESSION_CHECK_S):
            if not session.alive:
                mover.end("its engine has ended")
        lived = self._clock() - started
        proven = mover.reads_done > 0 or lived >= PROVEN_S or not session.alive
        self._delay.lost(self._clock(), proven)
        if self._mover is mover:
            self._mover = None
        await mover.gone()
