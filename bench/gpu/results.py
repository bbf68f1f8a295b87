"""The results of ``python -m bench.gpu``: one JSON file that grows part by part, and its table.

    {"machine": {"gpu": ..., "torch": ...},
     "parts": {"decode": {"state": "done", "key": ..., "date": ..., "seconds": ..., "rows": [...]}}}

A part is skipped in a later run if its state is ``done`` and its key is the same: the hash of the
sources, the device and the sizes. So a run that was stopped goes on where it was, and a changed
source or another GPU measures again. This module needs the standard library only, so that the
process that starts the parts holds no memory of the GPU.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MEASURED = ("engine", "protocol", "bench/gpu", "bench/lib", "bench/speculation", "tests/gpu",
            "tests/kernels")  # fmt: skip
"""Folders whose sources change what is measured."""

Row = dict[str, Any]
"""A ``GpuResult`` of bench.gpu.part as JSON: name, value, unit, against, ratio, aim."""


def source_hash(root: Path = ROOT) -> str:
    """Return a hash of the sources that are measured, changes that are not committed included."""
    h = hashlib.sha256()
    for folder in MEASURED:
        for path in sorted((root / folder).rglob("*.py")):
            h.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return h.hexdigest()[:12]


def commit(root: Path = ROOT) -> str:
    """Return the commit that the tree was made from, or "" where there is no git repository."""
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


class ResultFile:
    """The file ``path`` in memory. Each ``put`` writes it whole, so that nothing is lost when the
    process is killed between two parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine: dict[str, Any] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        if path.is_file():
            try:
                found = json.loads(path.read_text())
                self.machine, self.parts = found["machine"], found["parts"]
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(
                    f"{path}: not a file of results ({error!r}); name another with --out, or"
                    " delete it"
                ) from error

    def is_done(self, part: str, key: str) -> bool:
        """Return whether ``part`` has been measured under ``key``."""
        found = self.parts.get(part, {})
        return found.get("state") == "done" and found.get("key") == key

    def put(self, part: str, result: dict[str, Any]) -> None:
        """Replace the result of ``part`` and write the file."""
        self.parts[part] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"machine": self.machine, "parts": self.parts}, indent=1))
        new.replace(self.path)

    def value(self, part: str, name: str, key: str) -> float:
        """Return a value that was measured under ``key``, or 0.0 where there is none."""
        found = self.parts.get(part, {})
        rows = found.get("rows", ()) if found.get("key") == key else ()
        return next((float(row["value"]) for row in rows if row["name"] == name), 0.0)


def markdown(results: ResultFile, order: Sequence[str], key: str) -> Iterator[str]:
    """Yield the lines of the table for docs/benchmarks.md, and below it what it lacks. Only parts
    that were measured under ``key`` are in it, so that all figures belong together."""
    m = results.machine
    known = {name: results.parts[name] for name in order if name in results.parts}
    measured = {name: part for name, part in known.items() if part["key"] == key}
    dates = sorted({part["date"] for part in measured.values()})
    about = [m.get("gpu", "?"), *dates[-1:], f"torch {m.get('torch', '?')}"]
    about += [f"{name} {m[name]}" for name in ("triton", "transformers", "commit") if m.get(name)]
    yield f"{', '.join(about)}."
    yield ""
    yield "| what | value | unit | beside | ratio | aim | reached |"
    yield "|---|---|---|---|---|---|---|"
    for part in measured.values():
        yield from map(_line, part["rows"])
    for name, part in measured.items():
        if part["state"] != "done":
            yield ""
            yield f"{name}: {part['state']}. {part.get('why', '')}".rstrip()
    if missing := [name for name in order if name not in measured]:
        yield ""
        yield f"Not measured with these sources on this machine: {', '.join(missing)}."


def _line(row: Row) -> str:
    ratio, aim = row.get("ratio"), row.get("aim")
    cells = [
        row["name"],
        f"{row['value']:.4g}",
        row["unit"],
        row.get("against") or "",
        "" if ratio is None else f"{ratio:.2f}",
        "" if aim is None else f"{aim:.2f}",
        "" if aim is None or ratio is None else "yes" if ratio >= aim else "no",
    ]
    return f"| {' | '.join(cells)} |"
