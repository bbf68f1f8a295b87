"""Creates the certificates of a cluster: its own CA, and one per node (RFC 5280).

    DIR/ca.pem   ca.key       the CA; its key signs, and no process of the cluster needs it
    DIR/NAME.pem NAME.key     a node: certificate and key for both ends of a connection

A node's certificate names the node's hosts and, if the cluster has a name, this name. Files are
overwritten by ``renew_node_certificate`` only; running processes reload them within a second.
`baton certs` and `baton init` call this module.
"""

from __future__ import annotations

import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import StartupError, UsageError
from protocol.security.certificates import certificate_hosts, is_ca, may_sign
from protocol.security.tls import read_file, read_key

CA_DAYS = 3650
NODE_DAYS = 365

_CA = "ca"  # name of the CA's files, which no node may have
_EARLIER = timedelta(hours=1)  # clocks differ
_Key = ec.EllipticCurvePrivateKey

LOOPBACK = ("localhost", "127.0.0.1", "::1")

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\Z")


def create_ca(folder: Path, hosts: list[str], name: str | None = None) -> list[Path]:
    """Create a CA, and a first node's certificate for ``hosts`` and the cluster's ``name``.

    Returns the files. Raises StartupError."""
    names = subject_alternative_names(hosts, name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    cert, key = folder / f"{_CA}.pem", folder / f"{_CA}.key"
    _refuse_existing(cert, key)
    now, secret = datetime.now(UTC), _new_key()
    subject = _subject("Baton cluster CA")
    signed = (
        _builder(subject, subject, secret, now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .sign(secret, SHA256())
    )
    _write(key, _pem(secret), 0o600)
    _write(cert, signed.public_bytes(Encoding.PEM), 0o644)
    return [cert, key, *_node(folder, names)]


def create_node_certificate(folder: Path, hosts: list[str], name: str | None = None) -> list[Path]:
    """Create a certificate for one more node, and return its files. Raises StartupError."""
    return _node(folder, subject_alternative_names(hosts, name))


def renew_node_certificate(folder: Path, name: str) -> list[Path]:
    """Replace certificate and key of the node ``name``, for the same hosts; return the files.

    Raises StartupError, also for the CA, without which no certificate could be signed."""
    paths = [folder / f"{name}.pem", folder / f"{name}.key"]
    hosts = _hosts_of_node(paths[0])
    made = _signed(folder, subject_alternative_names(hosts))
    for path, content, mode in zip(paths, made, (0o644, 0o600), strict=True):
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)
        _write(fresh, content, mode)
        fresh.replace(path)
    return paths


def _hosts_of_node(cert: Path) -> list[str]:
    """Return the hosts in a certificate. Raises StartupError if it is not a node's."""
    try:
        old = x509.load_pem_x509_certificate(read_file(str(cert), "certs"))
        hosts, of_ca = certificate_hosts(old), cert.stem == _CA or is_ca(old)
    except ValueError:
        raise StartupError(f"{cert} holds no certificate in PEM format") from None
    if of_ca:
        raise StartupError(
            f"{cert} is the CA's, which is not renewed: expected the name of a node. A new CA and"
            " its nodes are made in another folder, by `baton certs init`"
        )
    return hosts


def _node(folder: Path, names: list[x509.GeneralName]) -> list[Path]:
    name = str(names[0].value).replace(":", "_").replace("*", "_")
    paths = [folder / f"{name}.pem", folder / f"{name}.key"]
    _refuse_existing(*paths)
    cert, key = _signed(folder, names)
    _write(paths[1], key, 0o600)
    _write(paths[0], cert, 0o644)
    return paths


def _signed(folder: Path, names: list[x509.GeneralName]) -> tuple[bytes, bytes]:
    """Return a new certificate and key for a node, as PEM."""
    ca, secret = _read_ca(folder)
    now, own = datetime.now(UTC), _new_key()
    subject = _subject(f"Baton node {names[0].value}"[:64])
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_key = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    signed = (
        _builder(subject, ca.subject, own, now, NODE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key),
            critical=False,
        )
        .sign(secret, SHA256())
    )
    return signed.public_bytes(Encoding.PEM), _pem(own)


def subject_alternative_names(hosts: list[str], name: str | None = None) -> list[x509.GeneralName]:
    """Return the subject alternative names (RFC 5280, 4.2.1.6) of ``hosts`` and ``name``.

    Raises StartupError for a host that is neither a DNS name nor an IP address."""
    names: list[x509.GeneralName] = []
    if (hosts or LOOPBACK)[0] == "ca":
        raise UsageError("--host: the first must not be 'ca', which the CA's files are called")
    for host in dict.fromkeys(hosts or LOOPBACK):
        address = _address(host)
        if address is None and not _is_dns_name(host.removeprefix("*.")):
            raise UsageError(f"--host must be a DNS name or an IP address, not {host!r}")
        names.append(x509.DNSName(host) if address is None else address)
    if name is not None and name not in hosts:
        if _address(name) is not None or not _is_dns_name(name):
            raise UsageError(f"--name must be a DNS name, as baton.cluster, not {name!r}")
        names.append(x509.DNSName(name))
    return names


def _address(host: str) -> x509.IPAddress | None:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return None


def _is_dns_name(text: str) -> bool:
    return len(text) <= 253 and all(_LABEL.match(label) for label in text.split("."))


def _read_ca(folder: Path) -> tuple[x509.Certificate, _Key]:
    cert, key = folder / f"{_CA}.pem", folder / f"{_CA}.key"
    try:
        ca = x509.load_pem_x509_certificate(read_file(str(cert), "certs"))
        secret = load_pem_private_key(read_key(str(key), "certs"), password=None)
        signs = may_sign(ca)
    except (ValueError, TypeError):
        raise StartupError(f"{cert} and {key} are not a CA that `baton certs init` made") from None
    if not isinstance(secret, _Key) or secret.public_key() != ca.public_key():
        raise StartupError(f"{key} is not the key of {cert}")
    if not signs:
        raise StartupError(
            f"{cert} is not a CA, so it must not sign: expected CA:TRUE and keyCertSign"
        )
    return ca, secret


def _builder(
    subject: x509.Name, issuer: x509.Name, key: _Key, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_key() -> _Key:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(key: _Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise StartupError(f"{path} exists already, and is not overwritten")


def _write(path: Path, content: bytes, mode: int) -> None:
    """Create a file that has its mode from the start."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
