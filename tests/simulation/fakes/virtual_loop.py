"""The virtual clock: an asyncio event loop that never waits, and the processes that share it.

    call_soon --> ready --> run                         (in the order of the calls)
    call_at   --> timers --clock jumps--> ready         (by time, then in the order of the calls)

Every callback belongs to the ``SimProcess`` in whose context it was scheduled. A process that is
paused gets its callbacks when it goes on, as after SIGSTOP and SIGCONT: what came over a network
first, then what was ready, then its timers. One that was killed never gets them. The loop has no
descriptors, threads or signals, so a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

PROCESS: ContextVar[SimProcess | None] = ContextVar("PROCESS", default=None)

EVERY = 64
"""Callbacks between two checks of what must hold."""

PRODUCT = ("protocol", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router")
"""Packages whose functions have a clock as the default of a parameter."""


class SimProcess:
    """One process of the simulated cluster. ``at`` is its time: the engine moves it ahead of the
    loop's while it computes a step."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self._loop = loop
        self.backlog: list[asyncio.Handle] = []  # since it was paused; kept for ever when killed
        self.on_kill: list[Callable[[], None]] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call ``call`` at once as this process."""
        return self.context.copy().run(call, *args)

    def spawn(self, work: Any, name: str = "") -> asyncio.Task[Any]:
        """Start a coroutine as a task of this process."""
        context = self.context.copy()
        task: asyncio.Task[Any] = self._loop.create_task(work, name=name or None, context=context)
        self._loop.kept.append(task)
        return task

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Run what has been waiting."""
        if self.paused and self.alive:
            self.paused = False
            waiting, self.backlog = self.backlog, []
            self._loop.release(sorted(waiting, key=_urgency))

    def kill(self) -> None:
        """End the process: nothing of it runs again, and nothing of it is cleaned up."""
        if self.alive:
            self.alive = False
            for call in self.on_kill:
                call()


class Delivery(asyncio.TimerHandle):
    """A message that reaches a process."""


def _urgency(handle: asyncio.Handle) -> int:
    if isinstance(handle, Delivery):
        return 0
    return 2 if isinstance(handle, asyncio.TimerHandle) else 1


class VirtualLoop(asyncio.BaseEventLoop):
    """The one event loop of a simulation. ``run`` is called once; ``kept`` keeps tasks from being
    collected, which would run their ``finally`` blocks at a time that no seed decides."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.kept: list[Any] = []
        self.failures: list[str] = []
        self.events = 0
        self._queue: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()
        self.on_events: Callable[[], None] = lambda: None  # after each EVERY callbacks
        self.open_pipe: Callable[[Any, Any], Any] | None = None
        self.set_exception_handler(self._note_exception)

    def time(self) -> float:
        return self.now

    # ---- scheduling -------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._add_timer(asyncio.TimerHandle(when, callback, args, self, context))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def deliver_at(
        self, when: float, process: SimProcess, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Call ``callback`` as ``process``, at ``when`` or when it runs again."""
        self._add_timer(Delivery(when, callback, args, self, process.context.copy()))

    def _add_timer(self, handle: asyncio.TimerHandle) -> asyncio.TimerHandle:
        heapq.heappush(self._timers, (handle._when, next(self._count), handle))  # type: ignore[attr-defined]
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is passed over when its time comes

    def release(self, handles: list[asyncio.Handle]) -> None:
        self._queue.extend(handles)

    # ---- running ----------------------------------------------------------------------------

    def run(self, work: Awaitable[Any], limit_s: float) -> Any:
        """Run until ``work`` is done, and return its result. Raise TimeoutError after ``limit_s``
        virtual seconds, and the exception of ``work``."""
        asyncio._set_running_loop(self)
        try:
            main: asyncio.Task[Any] = self.create_task(work)  # type: ignore[arg-type]
            while not main.done():
                if not self._queue and not self._advance(limit_s):
                    raise TimeoutError(f"the simulation has not ended at {self.now:g} s")
                self._run_one(self._queue.popleft())
            return main.result()
        finally:
            asyncio._set_running_loop(None)

    def _advance(self, limit_s: float) -> bool:
        """Let the clock jump to the next timer; return False if there is none in time."""
        while self._timers:
            when, _, handle = heapq.heappop(self._timers)
            if handle._cancelled:
                continue
            if when > limit_s:
                return False
            self.now = max(self.now, when)
            self._queue.append(handle)
            while self._timers and self._timers[0][0] <= self.now:
                self._queue.append(heapq.heappop(self._timers)[2])
            return True
        return False

    def _run_one(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and (process.paused or not process.alive):
            process.backlog.append(handle)
            return
        handle._run()
        self.events += 1
        if not self.events % EVERY:
            self.on_events()

    # ---- what asyncio asks a loop for -------------------------------------------------------

    async def create_unix_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], path: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        protocol = factory()
        return sock.connect_protocol(protocol), protocol

    def add_writer(  # type: ignore[override]
        self, fd: Any, callback: Any, *args: Any
    ) -> None:
        raise AssertionError("the simulated sockets are never full")

    def remove_writer(self, fd: Any) -> bool:
        return False

    def _note_exception(self, loop: Any, context: dict[str, Any]) -> None:
        """Record what nobody has handled: it is a bug of the product or of the simulation."""
        error = context.get("exception")
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.failures.append(f"{context.get('message')}: {type(error).__name__}: {error}")


class VirtualTime:
    """Stands for the clocks of the module ``time`` while a simulation runs."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None

    def __call__(self) -> float:
        return self.loop.now if self.loop is not None else 0.0


@contextlib.contextmanager
def virtual_time(clock: VirtualTime) -> Iterator[None]:
    """Let ``time.monotonic`` and ``time.perf_counter`` be ``clock``, also where a function of the
    product has taken one of them as a default."""
    real = {time.monotonic: "monotonic", time.perf_counter: "perf_counter"}
    changed: list[tuple[Any, str, Any]] = []
    for function in list(_product_functions()):
        for attribute in ("__defaults__", "__kwdefaults__"):
            before = getattr(function, attribute)
            after = _replaced(before, set(real), clock)
            if after is not None:
                changed.append((function, attribute, before))
                setattr(function, attribute, after)
    for function, name in real.items():
        changed.append((time, name, function))
        setattr(time, name, clock)
    try:
        yield
    finally:
        for owner, name, before in changed:
            setattr(owner, name, before)


def _replaced(defaults: Any, real: set[Any], clock: VirtualTime) -> Any:
    """Return ``defaults`` with ``clock`` for the real ones, or None if there are none."""
    if isinstance(defaults, tuple) and any(_is_in(v, real) for v in defaults):
        return tuple(clock if _is_in(v, real) else v for v in defaults)
    if isinstance(defaults, dict) and any(_is_in(v, real) for v in defaults.values()):
        return {k: clock if _is_in(v, real) else v for k, v in defaults.items()}
    return None


def _is_in(value: Any, real: set[Any]) -> bool:
    return any(value is function for function in real)


def _product_functions() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PRODUCT:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield from (v for v in vars(value).values() if hasattr(v, "__defaults__"))
            elif hasattr(value, "__defaults__") and getattr(value, "__module__", "") == name:
                yield value
