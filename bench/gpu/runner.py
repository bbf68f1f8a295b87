"""Runs the parts of ``python -m bench.gpu``, each in a process of its own with a time limit.

    for each part:  done before? --> skip
                    no time left? --> left for the next run
                    process --> rows (JSON lines, as they are measured) --> result file

A part that crashes or exceeds its limit loses only the rows that it had not measured yet: the
others go on. Its process group is killed, so that no engine of its keeps memory of the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.results import ROOT, ResultFile

TAIL_LINES = 40
"""Lines of a failed part's output that are kept."""

LEAST_S = 20.0
"""A part is not started with less time than this."""


@dataclass(frozen=True)
class GpuPart:
    """One part: ``target`` is the "module:function" that bench.gpu.part calls."""

    name: str
    target: str
    limit_s: float


@dataclass(frozen=True)
class RunOptions:
    """What all parts of a run share."""

    device: str
    tiny: bool = False
    again: bool = False
    profile: bool = False
    deadline: float = float("inf")  # on time.monotonic


class PartRunner:
    """Runs parts one after the other and records each in ``results``. ``say`` prints progress."""

    def __init__(
        self,
        results: ResultFile,
        options: RunOptions,
        sources: str,
        say: Callable[[str], None] = print,
    ) -> None:
        self._results = results
        self._options = options
        self._sources = sources
        self._say = say

    @property
    def key(self) -> str:
        """What a result depends on: sources, machine, and sizes."""
        m, options = self._results.machine, self._options
        sizes = "tiny" if options.tiny else "full"
        return f"{self._sources}/{m.get('gpu')}/{m.get('torch')}/{options.device}/{sizes}"

    def run(self, parts: Sequence[GpuPart]) -> bool:
        """Run ``parts`` in order, and return whether all of them are done now."""
        for part in parts:
            if self._results.is_done(part.name, self.key) and not self._options.again:
                self._say(f"{part.name}: done before")
                continue
            left = self._options.deadline - time.monotonic()
            if left < min(LEAST_S, part.limit_s):
                self._say(f"{part.name}: no time left; the same command goes on here")
                continue
            self._say(f"{part.name}: at most {min(left, part.limit_s):.0f} s ...")
            result = self._measure(part, min(left, part.limit_s))
            self._results.put(part.name, result)
            self._say(f"{part.name}: {result['state']} in {result['seconds']:.0f} s")
            for line in (*result["notes"], *result.get("tail", ())):
                self._say(f"  {line}")
        return all(self._results.is_done(part.name, self.key) for part in parts)

    def _measure(self, part: GpuPart, limit_s: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            rows, log = Path(folder) / "rows", Path(folder) / "log"
            began = time.monotonic()
            code = self._call(part, rows, log, limit_s)
            found: dict[str, Any] = {
                "state": "done" if code == 0 else "failed",
                "key": self.key,
                "date": time.strftime("%Y-%m-%d"),
                "seconds": round(time.monotonic() - began, 1),
                **_read_rows(rows),
            }
            if code is None:
                found["why"] = f"it exceeded its {limit_s:.0f} s"
            elif code:
                found["why"] = f"it ended with {code}"
            if code != 0:
                found["tail"] = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return found

    def _call(self, part: GpuPart, rows: Path, log: Path, limit_s: float) -> int | None:
        """Run the part's process. Return its exit code, or None where it exceeded ``limit_s``."""
        job = {
            "target": part.target,
            "device": self._options.device,
            "tiny": self._options.tiny,
            "profile": self._options.profile,
            "bandwidth": self._results.value("limits", "bandwidth", self.key) * 1e9,
            "rate": self._results.value("limits", "rate of products", self.key) * 1e12,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.part", str(rows), json.dumps(job)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:  # also when this process is interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _read_rows(path: Path) -> dict[str, Any]:
    """Return the rows and notes that a part has written; the last line may be cut short."""
    lines: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return {
        "rows": [line for line in lines if "note" not in line],
        "notes": [line["note"] for line in lines if "note" in line],
    }
