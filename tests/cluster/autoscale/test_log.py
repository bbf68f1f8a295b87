"""The log of decisions: whole lines, bounded, and what a restart takes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.autoscale import decision_log
from cluster.autoscale.decision_log import DecisionLog
from cluster.sizing.decision import DecisionRecord, decode_record
from cluster.sizing.policy import decide
from protocol.errors import StartupError
from tests.cluster.sizing.worlds import mix, snapshot


def opened(
    folder: Path, cluster: str = "c", most_bytes: int = decision_log.MAX_LOG_BYTES
) -> DecisionLog:
    made = DecisionLog(folder / "d.jsonl", cluster, most_bytes)
    made.open()
    return made


def record(of: DecisionLog, number: int = 1) -> DecisionRecord:
    seen = snapshot(1, 1, mix(40.0))
    return DecisionRecord(
        run=of.run, number=number, time_s=1.5, acted=True, snapshot=seen, decision=decide(seen)
    )


def test_lines_come_back(tmp_path: Path) -> None:
    of = opened(tmp_path)
    for i in range(3):
        of.append(record(of, i))
    found = [decode_record(line) for line in of.path.read_bytes().splitlines()]
    assert found == [record(of, i) for i in range(3)]
    assert of.path.stat().st_mode & 0o777 == 0o600


def test_it_is_bounded(tmp_path: Path) -> None:
    of = opened(tmp_path, most_bytes=4000)
    for i in range(40):
        of.append(record(of, i))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    assert all(path.stat().st_size <= 4000 for path in tmp_path.iterdir())
    lines = [
        decode_record(x) for n in reversed(names) for x in (tmp_path / n).read_bytes().splitlines()
    ]
    numbers = [line.number for line in lines]
    assert numbers == list(range(numbers[0], 40))


def test_what_a_restart_knows(tmp_path: Path) -> None:
    of = opened(tmp_path)
    assert of.restore(1000.0, 300.0) is None
    of.append(record(of))
    kept = opened(tmp_path).restore(1200.0, 300.0)
    assert kept is not None
    assert kept.memory == record(of).decision.memory
    assert kept.start_s == record(of).snapshot.tuning.start_s
    assert opened(tmp_path).restore(1301.0, 300.0) is None, "too old"
    assert opened(tmp_path).restore(999.0, 300.0) is None, "of another clock"
    assert opened(tmp_path, "other").restore(1200.0, 300.0) is None


def test_another_start_of_the_host_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = opened(tmp_path)
    of.append(record(of))
    assert decision_log.host_boot_id()
    monkeypatch.setattr(decision_log, "host_boot_id", lambda: "another")
    assert opened(tmp_path).restore(1000.0, 300.0) is None
    monkeypatch.setattr(decision_log, "host_boot_id", lambda: "")
    unknown = opened(tmp_path)
    unknown.append(record(unknown))
    assert opened(tmp_path).restore(1000.0, 300.0) is None


@pytest.mark.parametrize("rest", [b"{", b"\x00\xff", b'{"run": 3}\n', b"\n", b"[]\n"])
def test_damage_is_not_believed_and_costs_no_further_line(tmp_path: Path, rest: bytes) -> None:
    of = opened(tmp_path)
    of.append(record(of))
    with of.path.open("ab") as file:
        file.write(rest)
    again = opened(tmp_path)
    again.restore(1000.0, 300.0)  # of the line before, or nothing
    again.append(record(again, 2))
    assert decode_record(of.path.read_bytes().splitlines()[-1]).number == 2


def test_a_file_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    of = opened(tmp_path)
    of.append(record(of))
    of.path.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").unlink()
    of.append(record(of, 2))
    assert decode_record(of.path.read_bytes()).number == 2


def test_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"d\.jsonl' cannot be written.*autoscaler\.log"):
        (tmp_path / "file").write_text("")
        opened(tmp_path / "file")
