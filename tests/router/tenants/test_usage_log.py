"""One line for each response; a disk that is full or hangs costs lines and nothing else."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import StartupError
from router.common import json_lines_log
from router.tenants.usage_log import UsageLine, UsageLog


def line(number: int = 0) -> UsageLine:
    return UsageLine(
        time=1.5,
        tenant="acme",
        request_id=f"cmpl-{number}",
        status="ok",
        prompt_tokens=7,
        cached_tokens=3,
        output_tokens=2,
    )


def written(log: UsageLog, *lines: UsageLine) -> None:
    log.start()
    for each in lines:
        log.write(each)
    log.close()


def ids(path: Path) -> list[str]:
    return [json.loads(text)["request_id"] for text in path.read_text().splitlines()]


def test_lines_are_json_and_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for _ in range(2):  # the second run appends
        written(UsageLog(str(path)), line())
    expected = (
        '{"time":1.5,"tenant":"acme","request_id":"cmpl-0","status":"ok","prompt_tokens":7,'
        '"cached_tokens":3,"output_tokens":2}\n'
    )
    assert path.read_text() == 2 * expected
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_are_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    written(UsageLog(str(path), file_bytes=300), *map(line, range(30)))
    files = {p.name: ids(p) for p in tmp_path.iterdir() if p.suffix != ".lock"}
    names = ["usage.jsonl", *(f"usage.jsonl.{number}" for number in range(1, 6))]
    assert sorted(files) == names
    assert [i for name in reversed(names) for i in files[name]] == [
        f"cmpl-{number}" for number in range(18, 30)
    ]
    assert all((tmp_path / name).stat().st_size <= 300 for name in names)


def test_routers_of_one_host_take_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    logs = [UsageLog(str(path)) for _ in range(3)]
    for number, log in enumerate(logs):
        written(log, line(number))
    names = ("usage.jsonl", "usage-2.jsonl", "usage-3.jsonl")
    assert [ids(tmp_path / name) for name in names] == [["cmpl-0"], ["cmpl-1"], ["cmpl-2"]]
    written(UsageLog(str(path)), line(9))  # the first one is free again
    assert ids(path) == ["cmpl-0", "cmpl-9"]


def test_a_full_disk_drops_lines_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, real, calls = tmp_path / "usage.jsonl", os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            return real(file, data[:20])  # the rest does not fit
        if 3 <= calls <= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    log = UsageLog(str(path))
    monkeypatch.setattr("router.common.json_lines_log.os.write", write)
    written(log, *map(line, range(7)))
    assert ids(path) == ["cmpl-0", "cmpl-5", "cmpl-6"], "no half line is left"
    assert log.dropped == 4
    told = [r.getMessage() for r in caplog.records if r.name == "baton.lines"]
    assert told == [
        "lines of the usage log are dropped: No space left on device",
        "the usage log is written again; 4 lines are lost",
    ]


def test_a_disk_without_room_for_a_new_file_keeps_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, fails = tmp_path / "usage.jsonl", os.open, 20

    def opened(name: Path, *arguments: int) -> int:
        nonlocal fails
        if name == path and fails:
            fails -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(name, *arguments)

    written(UsageLog(str(path)), *map(line, range(9)))
    log = UsageLog(str(path), file_bytes=300)
    monkeypatch.setattr("router.common.json_lines_log.os.open", opened)
    written(log, *map(line, range(9, 30)))
    assert ids(tmp_path / "usage.jsonl.1") == [f"cmpl-{number}" for number in range(9)]
    assert (ids(path), log.dropped) == (["cmpl-29"], 20)


def test_a_disk_that_hangs_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, real = threading.Event(), os.write

    def write(file: int, data: bytes) -> int:
        assert free.wait(10)
        return real(file, data)

    monkeypatch.setattr("router.common.json_lines_log.os.write", write)
    monkeypatch.setattr(json_lines_log, "QUEUE_LINES", 5)
    monkeypatch.setattr(json_lines_log, "_CLOSE_S", 0.05)
    log = UsageLog(str(tmp_path / "usage.jsonl"))
    log.start()
    for number in range(100):
        log.write(line(number))
    assert 94 <= log.dropped <= 95
    log.close()
    assert log._thread.is_alive()
    free.set()
    log._thread.join(10)
    assert not log._thread.is_alive()
    assert [r.levelno for r in caplog.records if r.name == "baton.lines"][:1] == [logging.ERROR]


@pytest.mark.parametrize("name", ["none/usage.jsonl", "."])
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=r"router\.usage_log: cannot write"):
        UsageLog(str(tmp_path / name))


def test_descriptors_are_closed(tmp_path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before: Any = opened()
    for _ in range(3):
        written(UsageLog(str(tmp_path / "usage.jsonl"), file_bytes=1), line(), line())
    assert opened() == before
