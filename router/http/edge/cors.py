"""CORS (Fetch standard): which web pages of other origins may call the API from a browser.

``api.cors_origins`` lists them; by default there are none. Cookies and client certificates are not
allowed (``access-control-allow-credentials``): a page sends its API key in a header.
"""

from __future__ import annotations

import re

from starlette.types import Scope

ANY_ORIGIN = "*"

Headers = list[tuple[bytes, bytes]]

_FIELD_NAMES = re.compile(rb"[A-Za-z0-9_-][A-Za-z0-9_, -]{0,4095}\Z")
_PREFLIGHT_S = b"600"
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = (
    b"x-request-id, request-id, retry-after, x-baton-ignored, x-ratelimit-limit-requests,"
    b" x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens,"
    b" x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)


class CorsPolicy:
    """The origins of one router. ``origins``: as browsers send them, or ``*`` for any."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def response_headers(self, scope: Scope) -> Headers:
        """Return what is added to the response of a request: its page may read it, or not."""
        if self._any:
            allowed = b"*"
        else:
            allowed = _header(scope, b"origin")
            if allowed not in self._origins:
                return [(b"vary", b"origin")]
        headers = [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _EXPOSED),
        ]
        return headers if self._any else [*headers, (b"vary", b"origin")]

    def preflight_headers(self, scope: Scope) -> Headers | None:
        """Return the headers of the response (204) to a preflight request; None: it is none.

        For an origin that is not allowed they say nothing, so that the browser refuses."""
        is_preflight = scope["method"] == "OPTIONS" and _header(scope, b"origin")
        if not is_preflight or not _header(scope, b"access-control-request-method"):
            return None
        headers = self.response_headers(scope)
        if headers[0][0] == b"access-control-allow-origin":
            headers += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-max-age", _PREFLIGHT_S),
            ]
            wanted = _header(scope, b"access-control-request-headers")
            if _FIELD_NAMES.match(wanted):  # any: SDKs send many of their own
                headers.append((b"access-control-allow-headers", wanted))
        return headers


def _header(scope: Scope, name: bytes) -> bytes:
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if values else b""
