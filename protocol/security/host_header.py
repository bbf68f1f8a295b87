"""``AllowedHosts``: decides whether a request's ``Host`` header names this server.

Without API keys, a server on loopback trusts every program of this machine, and a browser is one.
A web page cannot read the responses of another origin; but the owner of a DNS name may let it point
to 127.0.0.1 once the page is loaded (DNS rebinding), and the browser takes the server for the same
origin. The header still has the page's name then. An IP address as host cannot be such a name:
a page with that origin was loaded from this server.

Other requests that pages can send across origins need no check: the router takes JSON only, for
which a browser first asks with OPTIONS, and that is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/@\s]+))(?::[0-9]{0,5})?\Z")
"""An IPv6 address in brackets, or a name or an IPv4 address; then a port."""


class AllowedHosts:
    """The host names of one server, beside ``localhost`` and IP addresses."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    def permit(self, header: bytes | str) -> bool:
        """Return whether a ``Host`` header, with or without a port, names this server."""
        text = header.decode("latin-1") if isinstance(header, bytes) else header
        found = _HOST.match(text.strip())
        if found is None:
            return False
        host = (found[1] or found[2]).lower().rstrip(".")
        return host in self._names or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
