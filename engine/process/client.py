"""The client of the engine process in its front: starts the process, watches it, and replaces it.

    starting --EngineReady--> serving --died or silent--> starting ...   (until stop or MAX_DEATHS)

``session()`` returns the session that serves now, or waits for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import msgspec

from engine.ipc import messages as m
from engine.ipc.counters import EngineCounters, SpeculationStatus
from engine.ipc.settings import EngineSettings
from engine.process.session import CacheListener, EngineSession, ProgressReport, spawn_engine
from protocol.errors import EngineDied, StartupError, Unavailable

log = logging.getLogger("baton.engine")

LOADING_SILENCE_S = 180.0
"""An engine that is loading and reports no progress for so long is stuck. The longest work between
two reports is a tensor from a slow disk, a first step of a large model on a CPU, or a first step on
a GPU that compiles several kernels, some seconds each."""

MIN_SILENCE_S = 3.5
"""An engine that serves and sends nothing for so long, seven beats, is stuck. ``_silence_limit``
allows more for models with longer steps."""

MAX_DEATHS = 5
"""Deaths of engines within DEATH_WINDOW_S after which the worker gives up."""

DEATH_WINDOW_S = 60.0


class EngineClient:
    """Owns the engine process of one worker, and its successors. The worker creates it, and ends
    the process with ``stop``."""

    def __init__(
        self,
        argv: list[str],
        settings: EngineSettings,
        report: ProgressReport,
        cache: CacheListener | None = None,
    ) -> None:
        self._argv = argv
        self._settings = settings
        self._report = report
        self._cache = cache
        self._handles = itertools.count(1)
        self._session: EngineSession | None = None
        self._settled = asyncio.Event()  # an engine serves, or the client has given up
        self._keeper: asyncio.Task[None] | None = None
        self._problem: str | None = None
        self._past = EngineCounters()  # sum over the engines that have died
        self.restarts = 0
        self.on_load: Callable[[], None] = lambda: None  # it may have changed

    async def start(self) -> m.EngineReady:
        """Start the first engine. Raise StartupError when it cannot load."""
        try:
            session = await self._launch()
        except EngineDied as error:
            raise StartupError(str(error)) from error
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
        """Return why no engine will serve again, or None."""
        return self._problem

    def counters(self) -> EngineCounters:
        """Return the counters of all engines so far, up to the last beat."""
        session = self._session
        return self._past.plus(session.beat.counters) if session is not None else self._past

    def speculation(self) -> SpeculationStatus:
        """Return the status of speculation at the last beat."""
        session = self.current
        return session.beat.speculation if session is not None else SpeculationStatus()

    def take_role(self, role: str) -> None:
        """Change the role of this engine from its next step on, and of its successors."""
        self._settings = msgspec.structs.replace(self._settings, role=role)
        if self._session is not None:
            self._session.send(m.TakeRole(role))

    def handle(self) -> int:
        """Return a new handle for a sequence."""
        return next(self._handles)

    @property
    def current(self) -> EngineSession | None:
        """The session that serves now, or None."""
        return self._session if self._settled.is_set() and self._problem is None else None

    async def session(self, wait_s: float) -> EngineSession:
        """Return the session that serves, waiting up to ``wait_s`` for the next one. Raise
        Unavailable if there is none by then, or if the client has given up."""
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

    async def _launch(self) -> EngineSession:
        """Start an engine. Raise EngineDied if it ends while it loads, without a word of its own,
        and StartupError for every other reason."""
        settings = self._settings
        session = spawn_engine(self._argv, settings, self._cache)
        try:
            ready = await self._open(session)
        except BaseException:
            session.end()
            raise
        self._session = session
        session.on_load = lambda: self.on_load()
        # A successor that starts under another role has the same sizes.
        self._settings = msgspec.structs.replace(
            self._settings,
            max_batch=ready.max_batch or settings.max_batch,
            prefill_chunk=ready.prefill_chunk or settings.prefill_chunk,
        )
        if self._settings.role != settings.role:  # changed while this engine was loading
            session.send(m.TakeRole(self._settings.role))
        self._settled.set()
        return session

    async def _open(self, session: EngineSession) -> m.EngineReady:
        """Wait until the engine is loaded. Raise StartupError if it fails or falls silent, and
        EngineDied if it ends."""
        opening = asyncio.create_task(session.open(self._report))
        silent = asyncio.create_task(session.silence.wait_for_silence(LOADING_SILENCE_S))
        try:
            await asyncio.wait([opening, silent], return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result()
            raise StartupError(
                f"the engine reported no progress for {LOADING_SILENCE_S:g} s while it was"
                f" {session.loading}"
            )
        finally:
            opening.cancel()
            silent.cancel()

    async def _keep(self, session: EngineSession) -> None:
        """Replace the engine whenever it is lost. An error here ends the client's attempts."""
        deaths: list[float] = []
        try:
            while True:
                why = await self._attend(session)
                self._settled.clear()
                session.end()
                session = await self._replace(session, why, deaths)
        except EngineDied as error:
            self._give_up(str(error))
        except Exception as error:
            log.exception("the engine is not replaced")
            self._give_up(f"the engine could not be restarted: {error}")

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        self._settled.set()

    async def _replace(self, old: EngineSession, why: str, deaths: list[float]) -> EngineSession:
        """Return the successor of ``old``. One that dies while it loads counts as another death;
        ``deaths`` are their times. Raise EngineDied after MAX_DEATHS within DEATH_WINDOW_S."""
        new: EngineSession | None = None
        while new is None:
            now = time.monotonic()
            deaths[:] = [*(t for t in deaths if now - t < DEATH_WINDOW_S), now]
            if len(deaths) >= MAX_DEATHS:
                raise EngineDied(f"{len(deaths)} engines died within a short time: {why}")
            log.warning("engine lost: %s; starting another (pid %d)", why, old.process.pid)
            self._report(f"engine lost: {why}; starting another", 0.0)
            try:
                new = await self._launch()
            except EngineDied as error:
                why = str(error)
        log.info("ready: engine pid %d, in place of pid %d", new.process.pid, old.process.pid)
        self._past = self._past.plus(old.beat.counters)
        self.restarts += 1
        assert old.ready is not None and new.ready is not None
        if new.ready.fingerprint != old.ready.fingerprint:
            raise StartupError("the model on disk has changed")
        return new

    async def _attend(self, session: EngineSession) -> str:
        """Dispatch the session's events until it is lost; return the cause."""
        listening = asyncio.create_task(session.listen())
        limit = self._silence_limit(session)
        silent = asyncio.create_task(session.silence.wait_for_silence(limit))
        try:
            await asyncio.wait([listening, silent], return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                return str(listening.exception())
            return f"no sign of life for {limit:.1f} s"
        finally:
            listening.cancel()
            silent.cancel()

    @staticmethod
    def _silence_limit(session: EngineSession) -> float:
        assert session.ready is not None
        return max(MIN_SILENCE_S, 4.0 * session.ready.step_seconds)
