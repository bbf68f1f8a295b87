from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from protocol.errors import StartupError
from router.common.errors import ApiError
from router.tenants.key_file import read_tenants
from router.tenants.tenant import DEFAULT_TENANT, Tenant


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(f"sk-one: acme\nsha256:{digest}:\n  tenant: umbrella\n  priority: 10\n")
    path.chmod(0o600)
    return path


def test_without_a_file_all_clients_are_the_default_tenant() -> None:
    for header in (None, "Bearer x", "garbage"):
        assert read_tenants(None).authenticate(header) is DEFAULT_TENANT


def test_keys_plain_and_hashed(keys: Path) -> None:
    tenants = read_tenants(str(keys))
    assert tenants.authenticate("Bearer sk-one") == Tenant("acme")
    assert tenants.authenticate("bearer  sk-two ") == Tenant("umbrella", 10)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic sk-one", "Bearer sk-on", "Bearer sk-öne", "sk-one"],
)
def test_others_are_refused_as_openai_does(keys: Path, header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_tenants(str(keys)).authenticate(header)
    error = caught.value
    assert (error.status, error.code, error.type) == (
        401,
        "invalid_api_key",
        "invalid_request_error",
    )
    assert "sk-" not in error.message


def test_a_hash_does_not_open_its_own_door(keys: Path) -> None:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    for given in (digest, f"sha256:{digest}"):
        with pytest.raises(ApiError):
            read_tenants(str(keys)).authenticate(f"Bearer {given}")


def test_a_priority_beyond_the_tenants_is_refused() -> None:
    Tenant("umbrella", 10).check_priority(10)
    with pytest.raises(ApiError, match="at least 10"):
        Tenant("umbrella", 10).check_priority(9)


def test_json_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"sk-one": {"tenant": "acme", "priority": 0}}')
    path.chmod(0o600)
    assert read_tenants(str(path)).authenticate("Bearer sk-one") == Tenant("acme", 0)


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
        "sha256:abc: a",
        "12345: a",
        "sk: ''",
        "sk: !!python/object/apply:os.getcwd []",
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(StartupError) as caught:
        read_tenants(str(path))
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_tenants(str(tmp_path / "none"))


def test_keys_that_everybody_could_read(keys: Path) -> None:
    keys.chmod(0o644)
    with pytest.raises(StartupError, match=r"api_keys: every user .* \(mode 0644\)") as raised:
        read_tenants(str(keys))
    assert "sk-one" not in str(raised.value)
    digest = hashlib.sha256(b"sk-two").hexdigest()
    keys.write_text(f"sha256:{digest}: umbrella\n")  # gives nothing away
    assert read_tenants(str(keys)).authenticate("Bearer sk-two") == Tenant("umbrella")
