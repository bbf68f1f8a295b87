"""A key that is revoked in the file is refused soon, and a broken file changes nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from router.common.errors import ApiError
from router.tenants.key_file import KeyTable, read_key_table
from router.tenants.key_store import KeyFileChanges, KeyStore
from router.tenants.tenant import Tenant


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    replace(path, "sk-one: acme\nsk-two: acme\n")
    return path


def replace(path: Path, text: str) -> None:
    """Write a new file and give it the name, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


def accepted(store: KeyStore, *keys: str) -> list[str]:
    found = []
    for key in keys:
        try:
            store.authenticate(f"Bearer {key}")
        except ApiError as error:
            assert error.status == 401
        else:
            found.append(key)
    return found


def look(changes: KeyFileChanges, store: KeyStore) -> bool:
    found = changes.check()
    if found is not None:
        store.use(found)
    return found is not None


def test_a_change_is_read_when_the_file_rests(keys: Path) -> None:
    store, changes = KeyStore(str(keys)), KeyFileChanges(str(keys))
    assert not look(changes, store)
    replace(keys, "sk-two: acme\nsk-six: umbrella\n")
    assert not look(changes, store), "it may still be written"
    keys.write_text("sk-two: acme\nsk-six: evil\nsk-ten: umbrella\n")
    assert not look(changes, store), "it was"
    assert look(changes, store)
    assert accepted(store, "sk-one", "sk-two", "sk-six", "sk-ten") == ["sk-two", "sk-six", "sk-ten"]
    assert store.authenticate("Bearer sk-six").name == "evil"
    assert list(store.tenants) == ["acme", "evil", "umbrella"]
    assert not look(changes, store), "nothing has changed since"


@pytest.mark.parametrize("text", ["sk-six: [", "", None])
def test_a_file_that_became_invalid_changes_nothing_and_is_told_once(
    keys: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    store, changes = KeyStore(str(keys)), KeyFileChanges(str(keys))
    if text is None:
        keys.unlink()
    else:
        replace(keys, text)
    for _ in range(5):
        look(changes, store)
    assert [store.valid] == [False]
    assert accepted(store, "sk-one", "sk-two", "sk-six") == ["sk-one", "sk-two"]
    [logged] = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert "is not used; its last content stays in use" in logged and "sk-" not in logged
    replace(keys, "sk-six: acme\n")
    for _ in range(2):
        look(changes, store)
    assert [store.valid] == [True]
    assert accepted(store, "sk-one", "sk-two", "sk-six") == ["sk-six"]


def test_a_change_of_the_mode_is_noticed(keys: Path) -> None:
    store, changes = KeyStore(str(keys)), KeyFileChanges(str(keys))
    for mode, valid in ((0o644, False), (0o600, True)):
        keys.chmod(mode)
        for _ in range(2):
            look(changes, store)
        assert store.valid is valid


def test_a_reader_that_fails_in_any_way_does_not_end_the_watch(keys: Path) -> None:
    def read(path: str) -> KeyTable:
        raise MemoryError

    store, changes = KeyStore(str(keys)), KeyFileChanges(str(keys), read)
    replace(keys, "sk-six: acme\n")
    for _ in range(2):
        look(changes, store)
    assert not store.valid


async def test_the_loop_goes_on_while_a_file_is_read_and_the_thread_ends(keys: Path) -> None:
    reading, proceed = threading.Event(), threading.Event()
    calls = 0

    def read(path: str) -> KeyTable:
        nonlocal calls
        calls += 1
        if calls > 1:  # the reload
            assert threading.current_thread() is not threading.main_thread()
            reading.set()
            assert proceed.wait(10)
        return read_key_table(path)

    store = KeyStore(str(keys), read, check_s=0.01)
    before = threading.active_count()
    store.start()
    replace(keys, "sk-two: acme\n")
    async with asyncio.timeout(10):
        while not reading.is_set():
            await asyncio.sleep(0.005)
        assert accepted(store, "sk-one", "sk-two") == ["sk-one", "sk-two"], "this did not wait"
        proceed.set()
        while accepted(store, "sk-one"):
            await asyncio.sleep(0.005)
    assert accepted(store, "sk-two") == ["sk-two"]
    store.close()
    assert threading.active_count() == before


def test_10_000_keys_are_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    digests = (f"{number:064x}" for number in range(10_000))
    path.write_text("".join(f"sha256:{digest}: acme\n" for digest in digests) + "sk-last: last\n")
    path.chmod(0o600)
    store = KeyStore(str(path))
    start = time.perf_counter()
    for _ in range(200):
        assert store.authenticate("Bearer sk-last") == Tenant("last")
    assert time.perf_counter() - start < 0.1, "a scan of all keys took 1 ms for each request"
    assert path.stat().st_size > 600_000
