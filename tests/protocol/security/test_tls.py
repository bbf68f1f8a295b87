"""Certificates as they are made, judged, used and renewed."""

from __future__ import annotations

import datetime
import logging
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest
from cryptography import x509

from cluster.credentials import certificates
from protocol.endpoints.grpc_endpoints import (
    LOOPBACK_ONLY,
    EndpointSecurity,
    host_of,
    join_host_port,
)
from protocol.errors import StartupError, TransferFailed
from protocol.security.certificates import WARN_DAYS, certificate_hosts
from protocol.security.listen_hosts import check_router_host, check_worker_host
from protocol.security.tls import (
    HttpTls,
    TlsFiles,
    TlsIdentity,
    check_private,
    http_not_after,
    read_pem_bundle,
)

DAY = 86_400.0


def files(folder: Path, name: str = "localhost") -> TlsFiles:
    paths = [str(folder / file) for file in ("ca.pem", f"{name}.pem", f"{name}.key")]
    return TlsFiles(ca=paths[0], cert=paths[1], key=paths[2])


@pytest.fixture
def made(tmp_path: Path) -> TlsFiles:
    certificates.create_ca(tmp_path / "a", [])
    return files(tmp_path / "a")


def other_ca(tmp_path: Path) -> TlsFiles:
    certificates.create_ca(tmp_path / "b", [])
    return files(tmp_path / "b")


def with_(tls: TlsFiles, **changes: str) -> TlsFiles:
    return TlsFiles(**{"ca": tls.ca, "cert": tls.cert, "key": tls.key, **changes})


# ---- what is made ---------------------------------------------------------------------------


def test_keys_are_private_and_nothing_is_overwritten(tmp_path: Path) -> None:
    wrote = certificates.create_ca(tmp_path / "x", ["node-1.example", "10.0.0.5", "fd00::5"])
    assert [p.name for p in wrote] == [
        "ca.pem",
        "ca.key",
        "node-1.example.pem",
        "node-1.example.key",
    ]
    assert {p.name: p.stat().st_mode & 0o777 for p in wrote if p.suffix == ".key"} == {
        "ca.key": 0o600,
        "node-1.example.key": 0o600,
    }
    before = [p.read_bytes() for p in wrote]
    with pytest.raises(StartupError, match=r"ca\.pem exists already"):
        certificates.create_ca(tmp_path / "x", [])
    with pytest.raises(StartupError, match="exists already"):
        certificates.create_node_certificate(tmp_path / "x", ["node-1.example"])
    assert [p.read_bytes() for p in wrote] == before
    read_pem_bundle(files(tmp_path / "x", "node-1.example"), time.time())
    [pem, _] = certificates.create_node_certificate(tmp_path / "x", ["fd00::6"])
    assert pem.name == "fd00__6.pem"


def test_openssl_agrees(made: TlsFiles) -> None:
    command = ["openssl", "verify", "-x509_strict", "-CAfile", made.ca]
    for purpose in ("sslserver", "sslclient"):
        done = subprocess.run([*command, "-purpose", purpose, made.cert], capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("host", ["", "no spaces", "-x", "a..b", "x" * 64, "10.0.0.5:80", "ü.de"])
def test_hosts_that_are_none(host: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--host must be"):
        certificates.create_ca(tmp_path / "x", [host])
    assert not (tmp_path / "x").exists()


def test_renewed_for_the_same_hosts(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path, ["n1", "10.0.0.5"], "baton.cluster")
    old = (tmp_path / "n1.pem").read_bytes()
    certificates.renew_node_certificate(tmp_path, "n1")
    new = (tmp_path / "n1.pem").read_bytes()
    assert new != old
    assert certificate_hosts(x509.load_pem_x509_certificate(new)) == [
        *("n1", "baton.cluster", "10.0.0.5")
    ]
    read_pem_bundle(files(tmp_path, "n1"), time.time())
    assert (tmp_path / "n1.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StartupError, match="cannot read"):
        certificates.renew_node_certificate(tmp_path, "n2")


@pytest.mark.parametrize("name", ["ca", "./ca"])
def test_the_ca_is_not_renewed(name: str, tmp_path: Path) -> None:
    wrote = certificates.create_ca(tmp_path, ["n1"])
    before = [path.read_bytes() for path in wrote]
    with pytest.raises(StartupError, match=r"ca\.pem is the CA's, which is not renewed"):
        certificates.renew_node_certificate(tmp_path, name)
    assert sorted(tmp_path.iterdir()) == sorted(wrote)
    assert [path.read_bytes() for path in wrote] == before
    (tmp_path / "ca.pem").replace(tmp_path / "n2.pem")  # whatever it is called
    with pytest.raises(StartupError, match=r"n2\.pem is the CA's"):
        certificates.renew_node_certificate(tmp_path, "n2")


def test_a_leaf_signs_nothing(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path, ["n1"])
    for suffix in ("pem", "key"):
        (tmp_path / f"n1.{suffix}").replace(tmp_path / f"ca.{suffix}")
    with pytest.raises(StartupError, match=r"ca\.pem is not a CA.*CA:TRUE and keyCertSign"):
        certificates.create_node_certificate(tmp_path, ["n2"])
    with pytest.raises(StartupError, match="is the CA's"):
        certificates.renew_node_certificate(tmp_path, "ca")


def test_a_ca_without_keycertsign_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = certificates._usage(ca=False)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "_usage", lambda *, ca: usage)
        with pytest.raises(StartupError, match="is not a CA"):
            certificates.create_ca(tmp_path, ["n1"])
    assert not (tmp_path / "n1.pem").exists()


# ---- what is refused at the start -----------------------------------------------------------


def test_what_is_wrong_is_said(made: TlsFiles, tmp_path: Path) -> None:
    other = other_ca(tmp_path)
    junk = tmp_path / "junk"
    junk.write_text("junk")
    junk.chmod(0o600)
    cases = {
        "tls.ca: cannot read": with_(made, ca=str(tmp_path / "none")),
        "tls.key: cannot read": with_(made, key=str(tmp_path / "none")),
        "was not issued by the CA": with_(made, ca=other.ca),
        "does not belong to the certificate": with_(made, key=other.key),
        "holds no certificate": with_(made, cert=str(junk)),
        "holds no unencrypted private key": with_(made, key=str(junk)),
    }
    for said, tls in cases.items():
        with pytest.raises(StartupError, match=said):
            TlsIdentity(tls)
        with pytest.raises(StartupError, match=said):
            EndpointSecurity(tls)
    Path(made.key).chmod(0o604)
    with pytest.raises(StartupError, match=r"every user .* \(mode 0604\).*chmod 600"):
        TlsIdentity(made)


def test_dates(made: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    now = time.time()
    with pytest.raises(StartupError, match=r"localhost\.pem expired on 20"):
        TlsIdentity(made, now=lambda: now + 366 * DAY)
    with pytest.raises(StartupError, match="is valid from"):
        TlsIdentity(made, now=lambda: now - DAY)
    caplog.set_level(logging.WARNING)
    TlsIdentity(made, now=lambda: now + (certificates.NODE_DAYS - WARN_DAYS - 1) * DAY)
    assert not caplog.records
    clock = 0.0
    identity = TlsIdentity(
        made, lambda: clock, now=lambda: now + (certificates.NODE_DAYS - WARN_DAYS + 1) * DAY
    )
    assert "in 13 days: renew it" in caplog.text
    for hour in range(30):  # once a day, not at each connection
        clock = hour * 3600.0
        identity.current()
    assert len(caplog.records) == 2


def test_an_expired_ca(made: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "CA_DAYS", 100)
    certificates.create_ca(tmp_path / "short", [])
    with pytest.raises(StartupError, match=r"ca\.pem expired on"):
        read_pem_bundle(files(tmp_path / "short"), time.time() + 101 * DAY)


# ---- renewal --------------------------------------------------------------------------------


def test_renewal_is_seen_and_half_of_one_is_not(made: TlsFiles, tmp_path: Path) -> None:
    clock = 0.0
    identity = TlsIdentity(made, lambda: clock)
    version, first = identity.current()
    folder = Path(made.cert).parent
    certificates.create_node_certificate(folder, ["127.0.0.1"])
    (folder / "127.0.0.1.key").replace(made.key)
    clock += 2
    assert identity.current() == (version, first), "the key alone is no identity"
    (folder / "127.0.0.1.pem").replace(made.cert)
    clock += 2
    again, second = identity.current()
    assert again == version + 1 and second.cert == Path(made.cert).read_bytes() != first.cert
    Path(made.cert).unlink()
    clock += 2
    assert identity.current() == (again, second)


# ---- connections ----------------------------------------------------------------------------


class Echo:
    """A server that says back what came."""

    def __init__(self, security: EndpointSecurity, host: str = "127.0.0.1") -> None:
        self.server = grpc.server(ThreadPoolExecutor(2))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
            lambda request, _: request
        )
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("Echo", {"Say": handler})]
        )
        self.endpoint = security.listen(self.server, host, 0)
        self.server.start()

    def ask(self, channel: grpc.Channel) -> bytes:
        with channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/Echo/Say")
            return call(b"hi", timeout=5)

    def refuses(self, channel: grpc.Channel) -> bool:
        try:
            self.ask(channel)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return True
        return False


def test_both_ends_prove_themselves(made: TlsFiles, tmp_path: Path) -> None:
    mine, theirs = EndpointSecurity(made), EndpointSecurity(other_ca(tmp_path))
    echo = Echo(mine)
    try:
        assert echo.ask(mine.channel(echo.endpoint)) == b"hi"
        assert echo.refuses(theirs.channel(echo.endpoint)), "of another cluster"
        assert echo.refuses(LOOPBACK_ONLY.channel(echo.endpoint)), "no TLS at all"
        anonymous = grpc.ssl_channel_credentials(Path(made.ca).read_bytes())
        assert echo.refuses(grpc.secure_channel(echo.endpoint, anonymous)), "no certificate"
        # One that trusts our CA, and shows a certificate of another.
        other = files(tmp_path / "b")
        mixed = grpc.ssl_channel_credentials(
            *(Path(p).read_bytes() for p in (made.ca, other.key, other.cert))
        )
        assert echo.refuses(grpc.secure_channel(echo.endpoint, mixed))
    finally:
        echo.server.stop(None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_names_and_addresses(host: str, made: TlsFiles) -> None:
    security = EndpointSecurity(made)
    echo = Echo(security, host)
    try:
        assert host_of(echo.endpoint) == host
        assert echo.ask(security.channel(echo.endpoint)) == b"hi"
    finally:
        echo.server.stop(None)


def test_a_node_is_not_believed_under_another_name(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path, ["elsewhere.example", "127.0.0.2"])
    certificates.create_node_certificate(tmp_path, ["127.0.0.1"])
    there = EndpointSecurity(files(tmp_path, "elsewhere.example"))
    here = EndpointSecurity(files(tmp_path, "127.0.0.1"))
    with pytest.raises(StartupError, match=r"for elsewhere\.example, 127\.0\.0\.2, and not for"):
        Echo(there)
    echo = Echo(there, "127.0.0.2")
    port = echo.endpoint.rpartition(":")[2]
    try:
        assert echo.ask(here.channel(echo.endpoint)) == b"hi"
        assert echo.refuses(here.channel(f"localhost:{port}"))
    finally:
        echo.server.stop(None)


def named(folder: Path, host: str, name: str, *, first: bool = False) -> TlsFiles:
    """A node at ``host``, which is not where it listens, of the cluster ``name``."""
    make = certificates.create_ca if first else certificates.create_node_certificate
    make(folder, [host], name)
    return msgspec.structs.replace(files(folder, host), name=name)


def test_all_prove_the_name_of_the_cluster(tmp_path: Path) -> None:
    """At an address that is in nobody's certificate; whoever asks for another name refuses."""
    there = named(tmp_path, "10.0.0.1", "baton.cluster", first=True)
    here = EndpointSecurity(named(tmp_path, "10.0.0.2", "baton.cluster"))
    nameless = EndpointSecurity(files(tmp_path, "10.0.0.2"))
    other = named(tmp_path, "10.0.0.3", "other.cluster")
    echoes = [Echo(EndpointSecurity(tls)) for tls in (there, other)]
    try:
        ours, others = echoes
        assert ours.ask(here.channel(ours.endpoint)) == b"hi"
        assert ours.refuses(nameless.channel(ours.endpoint)), "it asks for 127.0.0.1"
        assert others.ask(EndpointSecurity(other).channel(others.endpoint)) == b"hi"
        assert others.refuses(here.channel(others.endpoint)), "of the same CA, with another name"
    finally:
        for echo in echoes:
            echo.server.stop(None)
    with pytest.raises(StartupError, match=r"not for 'baton\.cluster'.*security\.tls\.name"):
        Echo(EndpointSecurity(msgspec.structs.replace(other, name="baton.cluster")))


@pytest.mark.parametrize("name", ["", "10.0.0.5", "*.cluster", "a b", "fd00::1"])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--name must be a DNS name"):
        certificates.create_ca(tmp_path / "x", [], name)
    assert not (tmp_path / "x").exists()


def test_a_server_uses_what_was_renewed(
    made: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running server gets a certificate of another CA: clients of the old one are refused."""
    monkeypatch.setattr("protocol.security.tls.CHECK_FILES_S", 0.0)
    mine, theirs = EndpointSecurity(made), EndpointSecurity(other_ca(tmp_path))
    own = [Path(path).read_bytes() for path in (made.ca, made.key, made.cert)]
    new_ca = (tmp_path / "b" / "ca.pem").read_bytes()
    # Believes both CAs, so that it is the server alone who refuses its certificate.
    old = grpc.ssl_channel_credentials(own[0] + new_ca, own[1], own[2])
    echo = Echo(EndpointSecurity(made))
    open_before = mine.channel(echo.endpoint)
    say: grpc.UnaryUnaryMultiCallable[bytes, bytes] = open_before.unary_unary("/Echo/Say")
    try:
        assert echo.ask(mine.channel(echo.endpoint)) == say(b"hi", timeout=5) == b"hi"
        assert echo.ask(grpc.secure_channel(echo.endpoint, old)) == b"hi"
        for name in ("ca.pem", "localhost.pem", "localhost.key"):
            (tmp_path / "b" / name).replace(tmp_path / "a" / name)
        assert echo.ask(theirs.channel(echo.endpoint)) == b"hi"
        assert echo.refuses(grpc.secure_channel(echo.endpoint, old))
        assert say(b"hi", timeout=5) == b"hi", "a connection that is open stays"
        version = mine.version
        assert echo.ask(mine.channel(echo.endpoint)) == b"hi"  # read again, too
        assert version == 1
    finally:
        open_before.close()
        echo.server.stop(None)


def test_two_cas_in_one_file_while_one_replaces_the_other(made: TlsFiles, tmp_path: Path) -> None:
    other = other_ca(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(Path(other.ca).read_bytes() + Path(made.ca).read_bytes())
    nodes = [EndpointSecurity(with_(tls, ca=str(both))) for tls in (made, other)]
    for here in nodes:
        echo = Echo(here)
        try:
            assert [echo.ask(there.channel(echo.endpoint)) for there in nodes] == [b"hi", b"hi"]
        finally:
            echo.server.stop(None)


@pytest.mark.parametrize("endpoint", ["10.0.0.5:80", "example.org:1", "unix:/x:1", "dns:x:1", ":1"])
def test_without_tls_nobody_else_is_dialled(endpoint: str, made: TlsFiles) -> None:
    assert not LOOPBACK_ONLY.permits(endpoint)
    for dial in (LOOPBACK_ONLY.channel, LOOPBACK_ONLY.async_channel):
        with pytest.raises(TransferFailed, match="not on this machine"):
            dial(endpoint)
    assert EndpointSecurity(made).permits(endpoint)


# ---- who may listen where -------------------------------------------------------------------


def test_workers_beyond_loopback() -> None:
    check_worker_host("127.0.0.1")
    check_worker_host("10.0.0.5", tls=True)
    with pytest.raises(StartupError, match=r"need TLS\. Missing: the files ca, cert and key"):
        check_worker_host("10.0.0.5")
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(StartupError, match="at which the others reach it"):
            check_worker_host(host, tls=True)


@pytest.mark.parametrize(
    ("keys", "tls", "plain", "missing"),
    [
        (True, True, False, ()),
        (True, False, True, ()),
        (False, True, False, ("API keys (",)),
        (True, False, False, ("certificate for HTTPS",)),
        (False, False, True, ("API keys (",)),
        (False, False, False, ("API keys (", "certificate for HTTPS")),
    ],
)
def test_routers_beyond_loopback(
    keys: bool, tls: bool, plain: bool, missing: tuple[str, ...]
) -> None:
    check_router_host("::1", api_keys=False, tls=False, allow_plain_http=False)
    if not missing:
        check_router_host("0.0.0.0", api_keys=keys, tls=tls, allow_plain_http=plain)
        return
    with pytest.raises(StartupError) as raised:
        check_router_host("0.0.0.0", api_keys=keys, tls=tls, allow_plain_http=plain)
    said = str(raised.value).partition("Missing: ")[2]
    for name in ("API keys (", "certificate for HTTPS"):
        assert (name in said) == (name in missing)


def test_endpoints() -> None:
    for host in ("10.0.0.5", "fd00::5", "n.example"):
        assert host_of(join_host_port(host, 80)) == host


def test_private_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("x")
    for mode, good in ((0o600, True), (0o640, True), (0o644, False), (0o602, False)):
        path.chmod(mode)
        if good:
            check_private(str(path), "f")
        else:
            with pytest.raises(StartupError, match=f"{mode:04o}"):
                check_private(str(path), "f")


def test_validity_is_sensible(made: TlsFiles) -> None:
    ca, cert = (x509.load_pem_x509_certificate(Path(p).read_bytes()) for p in (made.ca, made.cert))
    assert ca.not_valid_after_utc - cert.not_valid_after_utc > datetime.timedelta(days=3000)
    assert cert.not_valid_before_utc < datetime.datetime.now(datetime.UTC)


def test_when_a_certificate_ends(made: TlsFiles, tmp_path: Path) -> None:
    found = EndpointSecurity(made).not_after
    assert found is not None and abs(found - time.time() - certificates.NODE_DAYS * DAY) < DAY
    assert http_not_after(HttpTls(cert=made.cert, key=made.key)) == found
    assert http_not_after(HttpTls(cert=str(tmp_path / "none"), key=made.key)) is None
    assert LOOPBACK_ONLY.not_after is None
