"""Top-level fields of a body that no dialect knows: named for the client, or refused.

``api.unknown_fields`` decides which. Parsers of bodies call ``unknown_names``; ``router.http``
calls the other functions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from router.common.errors import ApiError, invalid

IGNORED_HEADER = "x-baton-ignored"

MAX_NAMES = 32
MAX_NAME_CHARS = 64
"""Names that one response lists, and the length of each."""

_NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.$-]")


def unknown_names(raw: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the first names in ``raw`` that are not known; ``null`` counts as absent."""
    names = (name for name, value in raw.items() if value is not None and name not in known)
    return tuple(name[:MAX_NAME_CHARS] for name in islice(names, MAX_NAMES))


def unknown_parameter(field: str, name: str, known: Collection[str]) -> ApiError:
    """Return the error for the path ``field``, which ends with ``name``; ``known``: the names that
    may stand there."""
    near = difflib.get_close_matches(name[:80], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return invalid(f"unknown parameter {field!r}{hint}", field, "unknown_parameter")


def ignored_headers(names: Collection[str]) -> dict[str, str]:
    """Return the header that names what was ignored; none where nothing was. Characters that do not
    belong in a header become ``?``."""
    if not names:
        return {}
    return {IGNORED_HEADER: ", ".join(_NOT_IN_HEADERS.sub("?", name) or "?" for name in names)}
