"""Values that the configuration and the settings share; imports nothing heavy."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

ENGINE = "cluster.worker.engine_main"
"""Takes the file descriptors of a socket and an arena as arguments, an EngineSpec as JSON on
standard input, and speaks ``engine/ipc/messages.py``. So does whatever is named in its place."""


_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def is_module_name(text: str) -> bool:
    """Whether ``text`` may name a module: nothing that ``python -m`` would take for an option."""
    return len(text) <= 128 and _MODULE.fullmatch(text) is not None


Mode: TypeAlias = Literal["off", "advise", "act"]
MOST = 10_000
"""Workers of one pool."""
