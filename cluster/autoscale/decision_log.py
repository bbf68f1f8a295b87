"""The decision log: one JSON line for each decision (``cluster/sizing/decision.py``).

A line contains everything that the policy got and returned, so that `baton simulate --replay` can
decide it again.

    decisions.jsonl  --at MAX_LOG_BYTES-->  decisions.jsonl.1  -->  decisions.jsonl.2  -->  deleted
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.sizing.decision import DecisionRecord, decode_record, encode_record
from cluster.sizing.snapshot import SizingMemory
from protocol.errors import StartupError
from protocol.roles import ROLES

MAX_LOG_BYTES = 64 * 2**20
KEPT_FILES = 2
_TAIL_BYTES = 1 << 20  # searched for the last line
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RestoredState(NamedTuple):
    """What continues from an earlier run: memory, and the seconds that a start takes."""

    memory: SizingMemory
    start_s: float


def host_boot_id() -> str:
    """Return an identifier of this start of the host, since which monotonic times count; empty if
    unknown."""
    try:
        return _BOOT.read_text().strip().replace("-", "")[:12]
    except OSError:
        return ""


class DecisionLog:
    """Appends lines to one file. ``run`` identifies the cluster, the start of the host, and the
    process."""

    def __init__(self, path: Path, cluster: str, most_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._prefix = f"{cluster}:{host_boot_id()}:"
        self.run = self._prefix + secrets.token_hex(4)
        self._most_bytes = most_bytes
        self._fd: int | None = None

    def open(self) -> None:
        """Open the file. Raises StartupError where it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            text = f"the log of decisions {str(self.path)!r} cannot be written: {error.strerror}"
            raise StartupError(f"{text}; set autoscaler.log to another path") from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def restore(self, now_s: float, younger_s: float) -> RestoredState | None:
        """Return the state of the last line if it belongs to this cluster and start of the host and
        is at most ``younger_s`` old; None otherwise."""
        line = self._last_line()
        try:
            record = decode_record(line) if line else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if record is None or not record.run.startswith(self._prefix) or self._prefix.endswith("::"):
            return None
        if not 0 <= now_s - record.snapshot.at_s <= younger_s:
            return None
        return RestoredState(record.decision.memory, record.snapshot.tuning.start_s)

    def append(self, record: DecisionRecord) -> None:
        """Append a line with one write, so that a reader finds whole lines. Blocks as long as the
        disk does. Raises OSError, or StartupError if the file cannot be opened again: the line is
        lost."""
        line = encode_record(record) + b"\n"
        fd = self._file_with_space(len(line))
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line that a full disk cut off stays apart
        if os.write(fd, line) < len(line):
            raise OSError("a line was only partly written")

    def _file_with_space(self, size_needed: int) -> int:
        """Return the file if so many bytes fit; rotate it, or open a new one where it was
        deleted."""
        if self._fd is None or not os.fstat(self._fd).st_nlink:
            self.close()
            self.open()
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if not size or size + size_needed <= self._most_bytes:
            return self._fd
        self.close()
        for i in range(KEPT_FILES, 0, -1):
            newer = self.path if i == 1 else self._older(i - 1)
            if newer.exists():
                newer.replace(self._older(i))
        self.open()
        return self._fd

    def _older(self, i: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{i}")

    def _last_line(self) -> bytes:
        """Return the last whole line."""
        assert self._fd is not None, "open it first"
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return tail[: tail.rfind(b"\n")].rpartition(b"\n")[2] if b"\n" in tail else b""


_SHOWN = {"prefill": "P", "decode": "D"}


def describe_turn(
    record: DecisionRecord, before: DecisionRecord | None, why: str = "", held: str = ""
) -> str | None:
    """Return a decision as one line for readers, or None if it changes nothing.

    ``before``: the last record that was printed. ``why``: why nothing is known. ``held``: why no
    worker is started or stopped (loans may be made nevertheless).
    """
    decision = record.decision
    changed = _changed_targets(record)
    moves = list(changed)
    for loan in decision.loans:
        other = "decode" if loan.role == "prefill" else "prefill"
        moves.append(f"{loan.instance[:8]} {other}->{loan.role}")
    if (
        before is not None
        and not _is_news(record, before)
        and (not moves or _is_repeated(record, before))
    ):
        return None
    wanted = ", ".join(f"{_SHOWN[role]} {decision.wanted.of(role)}" for role in ROLES)
    text = ", ".join(moves) or f"wanted: {wanted}"
    missed = "".join(f"; no number of workers meets {slo}" for slo in decision.slo_infeasible)
    undone = ""
    if not record.acted:
        undone = " [not carried out]"
    elif held and changed:
        undone = f" [not carried out: {', '.join(changed)}; {held}]"
    unknown = f" ({why})" if why and decision.reason == "no_metrics" else ""
    return f"{text} ({decision.reason}: {decision.text}{unknown}){missed}{undone}"


def _changed_targets(record: DecisionRecord) -> list[str]:
    """Return the changes of numbers of workers to ask for."""
    before, after = record.snapshot.targets, record.decision.targets
    changed = [role for role in ROLES if before.of(role) != after.of(role)]
    return [f"{_SHOWN[role]} {before.of(role)}->{after.of(role)}" for role in changed]


def _is_news(record: DecisionRecord, before: DecisionRecord) -> bool:
    """Return whether more than figures differ: the reason, who acts, what cannot be met."""
    now, then = record.decision, before.decision
    return (record.acted, now.reason, now.wanted, now.slo_infeasible) != (
        before.acted,
        then.reason,
        then.wanted,
        then.slo_infeasible,
    )


def _is_repeated(record: DecisionRecord, before: DecisionRecord) -> bool:
    """Return whether the same actions were printed before and have not been carried out."""
    return (record.snapshot.targets, record.decision.targets, record.decision.loans) == (
        before.snapshot.targets,
        before.decision.targets,
        before.decision.loans,
    )
