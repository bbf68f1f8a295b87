"""Variables that nobody reads, and whose names are nearly those of ones that somebody does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from cluster.config.keys import KEYS

_PREFIX = "BATON_"
_OTHERS = ("API_KEY", "CONFIG", "DIE_WITH_PARENT", "HOME", "LOCK_FD", "RUN_DIR")
_SIMILAR = 0.75  # difflib's ratio: of four letters one is another, or two are swapped
# What Kubernetes sets in a pod for a service "baton", or "baton-" and anything.
_SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_VALUES = ("tcp://", "udp://", "sctp://")


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A line for each, with the name that was meant, and without its value."""
    known = [key.variable.removeprefix(_PREFIX) for key in KEYS] + list(_OTHERS)
    lines = []
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in known:
            continue
        if _SERVICE.fullmatch(name) or value.startswith(_SERVICE_VALUES):
            continue
        if close := difflib.get_close_matches(name.upper(), known, n=1, cutoff=_SIMILAR):
            lines.append(f"nobody reads {variable}; did you mean {_PREFIX}{close[0]}?")
    return lines
