"""Logs whose files grow, begin again, or move to another folder."""

from __future__ import annotations

from pathlib import Path

from cluster.local.log_tail import LogTail


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def test_whole_lines_that_are_appended_are_returned_once(tmp_path: Path) -> None:
    log = tmp_path / "decode-7.log"
    append(log, ":job_id:01000000\none\ntwo\n")
    tail = LogTail(lambda: {path.name: path for path in tmp_path.iterdir()})
    assert tail.last_lines(1) == {"decode-7.log": [b"two"]}
    assert tail.new_lines() == {}
    append(log, "three\nfo")
    assert tail.new_lines() == {"decode-7.log": [b"three"]}
    append(log, "ur\n")
    append(tmp_path / "router-8.log", "of a process that started later\n")
    assert tail.new_lines() == {
        "decode-7.log": [b"four"],
        "router-8.log": [b"of a process that started later"],
    }
    assert tail.count == 2


def test_a_log_that_begins_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    append(log, "a line of the run before\n")
    tail = LogTail(lambda: {log.name: log})
    tail.last_lines(1)
    log.write_text("new\n")
    assert tail.new_lines() == {"supervisor.log": [b"new"]}


def test_a_log_that_is_kept_goes_on_where_it_was_read_to(tmp_path: Path) -> None:
    running, kept = tmp_path / "running", tmp_path / "kept"
    append(running, "one\n")
    found = {"decode-7.log": running}
    tail = LogTail(lambda: found)
    tail.last_lines(1)
    append(running, "two\n")
    found["decode-7.log"] = running.rename(kept)
    assert tail.new_lines() == {"decode-7.log": [b"two"]}
    found["decode-7.log"] = tmp_path / "cut"
    append(found["decode-7.log"], "two\n")  # only the end of a large log is kept
    assert tail.new_lines() == {}
