"""Reads and checks X.509 certificates (RFC 5280): issuer, host names, dates. Called by ``tls``."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from protocol.errors import StartupError

WARN_DAYS = 14


class PemBundle(NamedTuple):
    """PEM contents that one end of a mutual TLS connection needs."""

    ca: bytes
    cert: bytes  # with intermediate certificates after it, where there are any
    key: bytes


def check_certificates(pems: PemBundle, now: float, names: Mapping[str, str]) -> None:
    """Raise StartupError for files with which no connection could be made. ``now`` is in seconds
    since the epoch; ``names`` is how the message calls ca, cert and key."""
    cas = _parse(pems.ca, names["ca"])
    chain = _parse(pems.cert, names["cert"])
    _check_key(chain[0], pems.key, names["cert"], names["key"])
    for certificate in chain:
        _check_dates(certificate, now, names["cert"])
    issuer = _issuer(chain, cas)
    if issuer is None:
        raise StartupError(
            f"{names['cert']} was not issued by the CA in {names['ca']}: its issuer is"
            f" {_shown(chain[-1].issuer)}, the CA is {_shown(cas[0].subject)}"
        )
    _check_dates(issuer, now, names["ca"])


def is_issued_by(cert: bytes, ca: bytes) -> bool:
    """Return whether a CA in ``ca`` issued the certificate, by the chain in ``cert``."""
    try:
        chain, cas = x509.load_pem_x509_certificates(cert), x509.load_pem_x509_certificates(ca)
    except ValueError:
        return False
    return _issuer(chain, cas) is not None


def pem_hosts(cert: bytes) -> list[str]:
    """Return the host names and addresses of the first certificate. Raises ValueError."""
    return certificate_hosts(x509.load_pem_x509_certificates(cert)[0])


def check_certificate_host(cert: bytes, host: str, name: str | None) -> None:
    """Raise StartupError unless clients will accept the certificate of a server on ``host``: it
    must be for ``name`` if the cluster has one, else for ``host``."""
    names = certificate_hosts(x509.load_pem_x509_certificates(cert)[0])
    if any(_covers(each, name or host) for each in names):
        return
    given = f"the certificate is for {', '.join(names) or 'no host'}, and not for"
    if name is not None:
        raise StartupError(
            f"{given} {name!r}, the name that all processes of the cluster must prove"
            " (security.tls.name): make one with `baton certs node DIR --name` and that name"
        )
    raise StartupError(
        f"{given} {host!r}, where this process listens: make one with"
        " `baton certs node DIR --host` and that name"
    )


def certificate_hosts(certificate: x509.Certificate) -> list[str]:
    """Return the DNS names and IP addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(a) for a in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def is_ca(certificate: x509.Certificate) -> bool:
    """Return whether it says CA:TRUE (RFC 5280, 4.2.1.9). Raises ValueError for extensions that
    cannot be read."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return found.value.ca


def may_sign(certificate: x509.Certificate) -> bool:
    """Return whether it is a CA whose key may sign certificates (RFC 5280, 4.2.1.3). Raises
    ValueError like ``is_ca``."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    except x509.ExtensionNotFound:
        return False
    return is_ca(certificate) and usage.value.key_cert_sign


def not_after(pem: bytes) -> float:
    """Return when the first of these certificates expires, in seconds since the epoch. Raises
    ValueError."""
    return min(c.not_valid_after_utc for c in x509.load_pem_x509_certificates(pem)).timestamp()


def expiry_warning(pems: PemBundle, now: float) -> str | None:
    """Return the warning for a certificate that expires within WARN_DAYS; None for any other."""
    end = not_after(pems.cert)
    ends, days = datetime.fromtimestamp(end, UTC), (end - now) / 86_400
    if days > WARN_DAYS:
        return None
    if days <= 0:
        return f"the certificate expired on {ends:%Y-%m-%d}: new connections will be refused"
    return f"the certificate expires on {ends:%Y-%m-%d}, in {days:.0f} days: renew it"


def _parse(pem: bytes, name: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise StartupError(f"{name} holds no certificate in PEM format") from None


def _check_key(certificate: x509.Certificate, pem: bytes, cert_name: str, key_name: str) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise StartupError(f"{key_name} holds no unencrypted private key in PEM format") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise StartupError(f"the key in {key_name} does not belong to the certificate {cert_name}")


def _check_dates(certificate: x509.Certificate, now: float, name: str) -> None:
    moment = datetime.fromtimestamp(now, UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if moment > ends:
        raise StartupError(f"{name} expired on {ends:%Y-%m-%d %H:%M} UTC: renew it")
    if moment < begins:
        raise StartupError(
            f"{name} is valid from {begins:%Y-%m-%d %H:%M} UTC on; the clock here says"
            f" {moment:%Y-%m-%d %H:%M}"
        )


def _issuer(chain: list[x509.Certificate], cas: list[x509.Certificate]) -> x509.Certificate | None:
    """Return the CA at the end of the chain, in which the next certificate issues each; None if
    the chain is broken."""
    for certificate, by in itertools.pairwise(chain):
        if not _issued(certificate, by):
            return None
    return next((ca for ca in cas if _issued(chain[-1], ca)), None)


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _covers(name: str, host: str) -> bool:
    """Return whether a certificate name covers the host. A wildcard stands for the whole leftmost
    label (RFC 9525, 6.3)."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        pass
    name, host = name.lower(), host.lower().rstrip(".")
    return name == host or (name.startswith("*.") and name[2:] == host.partition(".")[2])


def _shown(name: x509.Name) -> str:
    return repr(name.rfc4514_string())
