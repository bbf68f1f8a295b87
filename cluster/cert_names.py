"""Whom a certificate is for: DNS names and addresses (RFC 5280, 4.2.1.6)."""

from __future__ import annotations

import ipaddress
import re

from cryptography import x509

from protocol.errors import StartupError

LOOPBACK = ("localhost", "127.0.0.1", "::1")

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\Z")


def names_of(hosts: list[str], name: str | None = None) -> list[x509.GeneralName]:
    """Subject alternative names: ``hosts``, and the cluster's ``name``.

    Raises StartupError for what is neither a name nor an address."""
    names: list[x509.GeneralName] = []
    if (hosts or LOOPBACK)[0] == "ca":
        raise StartupError("--host: the first must not be 'ca', which the CA's files are called")
    for host in dict.fromkeys(hosts or LOOPBACK):
        address = _address(host)
        if address is None and not _is_dns_name(host.removeprefix("*.")):
            raise StartupError(f"--host must be a DNS name or an IP address, not {host!r}")
        names.append(x509.DNSName(host) if address is None else address)
    if name is not None and name not in hosts:
        if _address(name) is not None or not _is_dns_name(name):
            raise StartupError(f"--name must be a DNS name, as baton.cluster, not {name!r}")
        names.append(x509.DNSName(name))
    return names


def _address(host: str) -> x509.IPAddress | None:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return None


def _is_dns_name(text: str) -> bool:
    return len(text) <= 253 and all(_LABEL.match(label) for label in text.split("."))
