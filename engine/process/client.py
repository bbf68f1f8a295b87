"""The front's hold on its engine: start it, watch it, replace it. Torch-free.

    starting --Ready--> serving --died or silent--> starting ...      (until stop, or out of tries)

``session()`` gives the session that serves now, or waits for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

import msgspec

from engine.ipc import messages as m
from engine.ipc.counters import Counters, SpecFigures
from engine.ipc.spec import EngineSpec
from engine.process.session import CacheListener, Report, Session, spawn
from protocol.errors import StartupError, Unavailable

log = logging.getLogger("baton.engine")

START_DEADLINE_S = 600.0
SILENCE_S = 3.5
"""An engine that says nothing for so long is stuck: seven beats. Longer for models whose own step
takes longer, see ``_silence_limit``."""

MAX_DEATHS = 5
"""Engines that may die within DEATH_WINDOW_S before the worker gives up."""

DEATH_WINDOW_S = 60.0


class EngineClient:
    """Owns the engine process, one at a time."""

    def __init__(
        self,
        argv: list[str],
        spec: EngineSpec,
        report: Report,
        cache: CacheListener | None = None,
    ) -> None:
        self._argv = argv
        self._spec = spec
        self._report = report
        self._cache = cache
        self._handles = itertools.count(1)
        self._session: Session | None = None
        self._settled = asyncio.Event()  # an engine serves, or there will be none
        self._keeper: asyncio.Task[None] | None = None
        self._problem: str | None = None
        self._past = Counters()  # of the engines that are gone
        self.restarts = 0

    async def start(self) -> m.Ready:
        """Start the first engine; raises StartupError when it cannot load."""
        session = await self._launch()
        self._keeper = asyncio.create_task(self._keep(session), name="engine-keeper")
        assert session.ready is not None
        return session.ready

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._session is not None:
            self._session.end()

    def problem(self) -> str | None:
        """Why this engine will not come back; None while there is hope."""
        return self._problem

    def counters(self) -> Counters:
        """What the engines have done, all of them, up to the last beat."""
        session = self._session
        return self._past.plus(session.beat.counters) if session is not None else self._past

    def speculation(self) -> SpecFigures:
        """As it stands, by the last beat."""
        session = self.current
        return session.beat.speculation if session is not None else SpecFigures()

    def take_role(self, role: str) -> None:
        """Of this engine from its next step on, and of all that come after it."""
        self._spec = msgspec.structs.replace(self._spec, role=role)
        if self._session is not None:
            self._session.send(m.TakeRole(role))

    def handle(self) -> int:
        """A handle that no sequence has had."""
        return next(self._handles)

    @property
    def current(self) -> Session | None:
        """The session that serves now."""
        return self._session if self._settled.is_set() and self._problem is None else None

    async def session(self, wait_s: float) -> Session:
        """The session that serves, or the next one to. Raises Unavailable after ``wait_s``, or at
        once when there will be none."""
        try:
            async with asyncio.timeout(wait_s):
                await self._settled.wait()
        except TimeoutError as error:
            raise Unavailable(f"no engine within {wait_s:g} s") from error
        if self._problem is not None:
            raise Unavailable(self._problem)
        assert self._session is not None
        return self._session

    # ---- keeping one alive ------------------------------------------------------------------

    async def _launch(self) -> Session:
        spec = self._spec
        session = spawn(self._argv, spec, self._cache)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await session.open(self._report)
        except TimeoutError as error:
            session.end()
            raise StartupError(f"the engine was not ready after {START_DEADLINE_S:g} s") from error
        except BaseException:
            session.end()
            raise
        self._session = session
        if self._spec.role != spec.role:  # it has changed while this one was loading
            session.send(m.TakeRole(self._spec.role))
        self._settled.set()
        return session

    async def _keep(self, session: Session) -> None:
        """Replace the engine whenever it is lost; whatever goes wrong here is the problem."""
        deaths: list[float] = []
        try:
            while True:
                why = await self._attend(session)
                self._settled.clear()
                session.end()
                deaths = [t for t in deaths if time.monotonic() - t < DEATH_WINDOW_S]
                deaths.append(time.monotonic())
                if len(deaths) >= MAX_DEATHS:
                    return self._give_up(f"{len(deaths)} engines died lately: {why}")
                session = await self._replace(session, why)
        except Exception as error:
            log.exception("the engine is not replaced")
            self._give_up(f"the engine does not start again: {error}")

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        self._settled.set()

    async def _replace(self, old: Session, why: str) -> Session:
        log.warning("engine lost: %s; starting another", why)
        self._report(f"engine lost: {why}; starting another", 0.0)
        new = await self._launch()
        self._past = self._past.plus(old.beat.counters)
        self.restarts += 1
        assert old.ready is not None and new.ready is not None
        if new.ready.fingerprint != old.ready.fingerprint:
            raise StartupError("the model on disk is not the one that was served before")
        return new

    async def _attend(self, session: Session) -> str:
        """Dispatch the session's events until it is lost; says how."""
        listening = asyncio.create_task(session.listen())
        limit = self._silence_limit(session)
        silent = asyncio.create_task(session.silence.lasts(limit))
        try:
            await asyncio.wait([listening, silent], return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                return str(listening.exception())
            return f"no sign of life for {limit:.1f} s"
        finally:
            listening.cancel()
            silent.cancel()

    @staticmethod
    def _silence_limit(session: Session) -> float:
        assert session.ready is not None
        return max(SILENCE_S, 4.0 * session.ready.step_seconds)
