"""An event loop whose clock jumps: timers come due at once, so that a minute takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class _JumpingSelector(selectors.BaseSelector):
    """A selector that never waits: the time that it would wait for passes on the loop's clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready:
            assert timeout is not None, "a task waits for what never comes"
            self.now += timeout
        return ready

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of one input. Exceptions that no task handles are kept in ``errors``."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self.errors: list[dict[str, Any]] = []
        super().__init__(self._jumping)
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self._jumping.now
