from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from protocol.errors import StartupError
from router.common.errors import ApiError
from router.tenants.key_store import KeyStore
from router.tenants.tenant import DEFAULT_TENANT, SCOPES, KeyScope, Tenant, TenantLimits

DIGEST = hashlib.sha256(b"sk-two").hexdigest()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return written(
        tmp_path, f"sk-one: acme\nsha256:{DIGEST}:\n  tenant: umbrella\n  priority: 10\n"
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def tenant_of(path: Path, key: str) -> Tenant:
    return KeyStore(str(path)).authenticate(f"Bearer {key}")


def test_without_a_file_all_clients_are_the_default_tenant() -> None:
    for header in (None, "Bearer x", "garbage"):
        assert KeyStore(None).authenticate(header, "admin") is DEFAULT_TENANT


def test_keys_plain_and_hashed(keys: Path) -> None:
    tenants = KeyStore(str(keys))
    assert tenants.authenticate("Bearer sk-one") == Tenant("acme")
    assert tenants.authenticate("bearer  sk-two ") == Tenant("umbrella", 10)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic sk-one", "Bearer sk-on", "Bearer sk-öne", "sk-one"],
)
def test_others_are_refused_as_openai_does(keys: Path, header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        KeyStore(str(keys)).authenticate(header)
    error = caught.value
    assert (error.status, error.code, error.type) == (
        401,
        "invalid_api_key",
        "invalid_request_error",
    )
    assert "sk-" not in error.message


def test_a_hash_does_not_open_its_own_door(keys: Path) -> None:
    for given in (DIGEST, f"sha256:{DIGEST}"):
        with pytest.raises(ApiError):
            tenant_of(keys, given)


def test_a_priority_beyond_the_tenants_is_refused() -> None:
    Tenant("umbrella", 10).check_priority(10)
    with pytest.raises(ApiError, match="at least 10"):
        Tenant("umbrella", 10).check_priority(9)


def test_a_key_without_a_priority_may_not_be_more_urgent_than_others(keys: Path) -> None:
    with pytest.raises(ApiError, match="at least 0"):
        tenant_of(keys, "sk-one").check_priority(-1)


def test_json_is_yaml(tmp_path: Path) -> None:
    path = written(tmp_path, '{"sk-one": {"tenant": "acme", "priority": 0}}')
    assert tenant_of(path, "sk-one") == Tenant("acme", 0)


def test_a_file_without_keys_accepts_none(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="does not know it"):
        tenant_of(written(tmp_path, "{}"), "sk-one")


def test_all_fields(tmp_path: Path) -> None:
    text = (
        "sk-one: {tenant: acme, priority: -5, weight: 2.5, scopes: [monitor, generate],"
        " concurrency: 4, requests_per_minute: 60, tokens_per_minute: 1000}\n"
    )
    limits = TenantLimits(4, 60, 1000)
    scopes: frozenset[KeyScope] = frozenset({"generate", "monitor"})
    assert tenant_of(written(tmp_path, text), "sk-one") == Tenant("acme", -5, 2.5, limits, scopes)


def test_limits_hold_for_all_keys_of_a_tenant(tmp_path: Path) -> None:
    text = (
        "sk-one: {tenant: acme, priority: 3}\n"
        "sk-two: {tenant: acme, weight: 2, requests_per_minute: 60}\n"
        "sk-six: {tenant: acme, concurrency: null, requests_per_minute: 60}\n"
    )
    path = written(tmp_path, text)
    for key, priority in (("sk-one", 3), ("sk-two", 0), ("sk-six", 0)):
        limits = TenantLimits(requests_per_minute=60)
        assert tenant_of(path, key) == Tenant("acme", priority, 2.0, limits)


@pytest.mark.parametrize("name", ["weight", *TenantLimits._fields])
def test_keys_of_a_tenant_that_contradict_each_other(tmp_path: Path, name: str) -> None:
    text = f"sk-one: {{tenant: acme, {name}: 2}}\nsk-two: b\nsk-six: {{tenant: acme, {name}: 3}}\n"
    with pytest.raises(StartupError) as raised:
        KeyStore(str(written(tmp_path, text)))
    message = str(raised.value)
    assert "line 3: " in message and "line 1;" in message and f"{name} of tenant 'acme'" in message
    assert "sk-" not in message


@pytest.mark.parametrize("text", ["sk-two: acme\nsk-two: evil\n", f"sk-two: a\nsha256:{DIGEST}: b"])
def test_a_key_that_is_there_twice(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartupError, match="line 2: this key is given twice"):
        KeyStore(str(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [(["generate"], "generate"), (["monitor"], "monitor"), (["admin"], " ".join(SCOPES))],
)
def test_scopes(tmp_path: Path, scopes: list[str], allowed: str) -> None:
    store = KeyStore(str(written(tmp_path, f"sk-one: {{tenant: acme, scopes: {scopes}}}")))
    for scope in SCOPES:
        if scope in allowed.split():
            assert store.authenticate("Bearer sk-one", scope).name == "acme"
            continue
        with pytest.raises(ApiError, match=f"needs an API key with the scope '{scope}'") as raised:
            store.authenticate("Bearer sk-one", scope)
        assert (raised.value.status, raised.value.code) == (403, "insufficient_scope")


def test_a_key_without_scopes_generates_and_does_not_monitor(keys: Path) -> None:
    store = KeyStore(str(keys))
    assert store.authenticate("Bearer sk-one", "generate").name == "acme"
    with pytest.raises(ApiError, match="scope 'monitor'"):
        store.authenticate("Bearer sk-one", "monitor")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "sk: [secret",
        "sk: {tenant: 5}",
        "sk: {tenant: a, quota: 5}",
        "sk: {tenant: a, priority: 1000}",
        "sk: {tenant: a, priority: true}",
        "sk: {tenant: a, weight: 0}",
        "sk: {tenant: a, weight: .nan}",
        "sk: {tenant: a, weight: .inf}",
        "sk: {tenant: a, weight: true}",
        "sk: {tenant: a, scopes: []}",
        "sk: {tenant: a, scopes: generate}",
        "sk: {tenant: a, scopes: [root]}",
        "sk: {tenant: a, concurrency: 0}",
        "sk: {tenant: a, requests_per_minute: 1.5}",
        "sk: {tenant: a, tokens_per_minute: true}",
        "sk: {tenant: a, tokens_per_minute: 10000000000000}",
        "sk: {[]: a}",
        "[]: a",
        "? {a: b}\n: c",
        "sk: &a [*a]",
        "<<: {sk: a}",
        "sha256:abc: a",
        "12345: a",
        "sk: ''",
        f"sk: {'a' * 257}",
        'sk: "a\\nb"',
        '"s\\uD800": a',
        "sk: !!python/object/apply:os.getcwd []",
        "[" * 5000,
        "sk: a\n---\nsk: b\n",
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartupError) as caught:
        KeyStore(str(written(tmp_path, text)))
    assert "secret" not in str(caught.value)


def test_a_key_that_no_header_can_hold(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"line 2: every key .* ASCII") as raised:
        KeyStore(str(written(tmp_path, "sk-one: acme\nsk-schlüssel: umbrella\n")))
    assert "schl" not in str(raised.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    path.write_bytes(b"sk: \xff\xfe")
    with pytest.raises(StartupError, match="not UTF-8 text"):
        KeyStore(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        KeyStore(str(tmp_path / "none"))


def test_keys_that_everybody_could_read(keys: Path) -> None:
    keys.chmod(0o644)
    with pytest.raises(StartupError, match=r"api_keys: every user .* \(mode 0644\)") as raised:
        KeyStore(str(keys))
    assert "sk-one" not in str(raised.value)
    keys.write_text(f"sha256:{DIGEST}: umbrella\n")  # gives nothing away
    assert tenant_of(keys, "sk-two") == Tenant("umbrella")
