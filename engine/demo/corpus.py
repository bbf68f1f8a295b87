"""The demo's text: the Python standard library, split into training and held-out files."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 3
# Folders whose Python files are left out: tests, and tables of data that are code in name only.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # build settings of the local interpreter


@dataclass(frozen=True)
class Corpus:
    """The text of each file, in the order of the files' paths."""

    train: list[str]
    held_out: list[str]


def read_corpus() -> Corpus:
    """Read the standard library, split by a hash of each file's path relative to its root."""
    root = Path(sysconfig.get_path("stdlib"))
    corpus = Corpus([], [])
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(SKIPPED_PREFIXES):
            continue
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if digest in seen or not text.strip():
            continue
        seen.add(digest)
        (corpus.held_out if is_held_out(parts) else corpus.train).append(text)
    return corpus


def is_held_out(parts: tuple[str, ...]) -> bool:
    """Whether the file at this relative path is kept from training; depends on the path only."""
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT
