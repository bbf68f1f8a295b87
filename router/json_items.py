"""How many things a JSON text holds, told before it is decoded.

Numbers are cheap, and a prompt may be a million of them. Strings, names, arrays and objects each
take memory and, for the last two, the time of the garbage collector: 8 MiB of ``[],[],...`` would
keep the event loop for seconds.
"""

from __future__ import annotations

import re
from itertools import islice

MAX_ITEMS = 1 << 18

_MARKS = (b'"', b"[", b"{", b":")
_ITEM = re.compile(rb'"[^"]*"?|[\[{:]')
"""A string, or what begins an array, an object or a member; escapes have been taken out."""


def too_many_items(data: bytes) -> bool:
    """Whether ``data`` has more than ``MAX_ITEMS`` strings, arrays, objects and members. Takes some
    60 ms at most for 8 MiB; what is not JSON is counted somehow."""
    if sum(map(data.count, _MARKS)) <= MAX_ITEMS:  # most bodies, whatever is in their strings
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return next(islice(_ITEM.finditer(data), MAX_ITEMS, None), None) is not None
