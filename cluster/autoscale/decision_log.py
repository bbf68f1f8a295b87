"""The log of decisions: one JSON line each (``cluster/sizing/decision.py``), which is everything
that the policy was told and said, so that it can be asked again.

    decisions.jsonl  --at MOST_BYTES-->  decisions.jsonl.1  -->  decisions.jsonl.2  -->  gone
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.sizing.decision import Record, from_line, to_line
from cluster.sizing.snapshot import Memory
from protocol.errors import StartupError
from protocol.roles import ROLES

MOST_BYTES = 64 * 2**20
KEPT = 2
_TAIL_BYTES = 1 << 20  # in which the last line is looked for
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Kept(NamedTuple):
    """What goes on from an earlier run: memory, and the seconds that a start takes."""

    memory: Memory
    start_s: float


def boot() -> str:
    """Of this start of the host: what monotonic times count from. Empty where none is told."""
    try:
        return _BOOT.read_text().strip().replace("-", "")[:12]
    except OSError:
        return ""


class DecisionLog:
    """Appends, line by line. ``run``: of which cluster, since which start of the host, by whom."""

    def __init__(self, path: Path, cluster: str, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._of = f"{cluster}:{boot()}:"
        self.run = self._of + secrets.token_hex(4)
        self._most_bytes = most_bytes
        self._fd: int | None = None

    def open(self) -> None:
        """Raises StartupError where the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            text = f"the log of decisions {str(self.path)!r} cannot be written: {error.strerror}"
            raise StartupError(f"{text}; say another as autoscaler.log") from error

    def close(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def kept(self, now_s: float, younger_s: float) -> Kept | None:
        """Of the last line, where it is of this cluster and start of the host, and not older than
        ``younger_s``; None: begin anew."""
        line = self._last_line()
        try:
            record = from_line(line) if line else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if record is None or not record.run.startswith(self._of) or self._of.endswith("::"):
            return None
        if not 0 <= now_s - record.snapshot.at_s <= younger_s:
            return None
        return Kept(record.decision.memory, record.snapshot.tuning.start_s)

    def append(self, record: Record) -> None:
        """One write, so that a reader finds whole lines. Blocks as long as the disk does. Raises
        OSError, or StartupError where there is no such file any more: the line is lost."""
        line = to_line(record) + b"\n"
        fd = self._opened(len(line))
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # what a full disk left of a line stays apart
        if os.write(fd, line) < len(line):
            raise OSError("a line was not written to its end")

    def _opened(self, room: int) -> int:
        """The file, with room for so many bytes; a new one where somebody took it away."""
        if self._fd is None or not os.fstat(self._fd).st_nlink:
            self.close()
            self.open()
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if not size or size + room <= self._most_bytes:
            return self._fd
        self.close()
        for i in range(KEPT, 0, -1):
            newer = self.path if i == 1 else self._older(i - 1)
            if newer.exists():
                newer.replace(self._older(i))
        self.open()
        return self._fd

    def _older(self, i: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{i}")

    def _last_line(self) -> bytes:
        """The last whole one."""
        assert self._fd is not None, "open it first"
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return tail[: tail.rfind(b"\n")].rpartition(b"\n")[2] if b"\n" in tail else b""


# MERGED cluster.autoscale.tell
# A decision in one line, for people; none where it changes nothing.

_SHOWN = {"prefill": "P", "decode": "D"}


def line(record: Record, before: Record | None, why: str = "", held: str = "") -> str | None:
    """``before``: the last one that was told; ``why``: nothing is known, if so; ``held``: why
    nobody is started or ended, if so (loans may be made all the same)."""
    made = record.decision
    numbers = _numbers(record)
    moves = list(numbers)
    for loan in made.loans:
        other = "decode" if loan.role == "prefill" else "prefill"
        moves.append(f"{loan.instance[:8]} {other}->{loan.role}")
    if before is not None and not _news(record, before) and (not moves or _asked(record, before)):
        return None
    wanted = ", ".join(f"{_SHOWN[role]} {made.wanted.of(role)}" for role in ROLES)
    said = ", ".join(moves) or f"wanted: {wanted}"
    missed = "".join(f"; no number of workers meets {slo}" for slo in made.slo_infeasible)
    undone = ""
    if not record.acted:
        undone = " [not carried out]"
    elif held and numbers:
        undone = f" [not carried out: {', '.join(numbers)}; {held}]"
    unknown = f" ({why})" if why and made.reason == "no_metrics" else ""
    return f"{said} ({made.reason}: {made.text}{unknown}){missed}{undone}"


def _numbers(record: Record) -> list[str]:
    """Workers to ask for, of the pools for which that is another number."""
    before, after = record.snapshot.targets, record.decision.targets
    changed = [role for role in ROLES if before.of(role) != after.of(role)]
    return [f"{_SHOWN[role]} {before.of(role)}->{after.of(role)}" for role in changed]


def _news(record: Record, before: Record) -> bool:
    """Something else than figures is another: the reason, who acts, what cannot be met."""
    now, then = record.decision, before.decision
    return (record.acted, now.reason, now.wanted, now.slo_infeasible) != (
        before.acted,
        then.reason,
        then.wanted,
        then.slo_infeasible,
    )


def _asked(record: Record, before: Record) -> bool:
    """The same was said before, and nobody has done it."""
    return (record.snapshot.targets, record.decision.targets, record.decision.loans) == (
        before.snapshot.targets,
        before.decision.targets,
        before.decision.loans,
    )
