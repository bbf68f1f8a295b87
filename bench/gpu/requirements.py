"""What ``python -m bench.gpu`` needs, and what of it is missing. Needs no package itself.

A machine with a GPU often has torch and no way to an index, so the check names everything at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from engine.execution.build_tools import missing_build_tools


class NeededPackage(NamedTuple):
    """A distribution, the least version that works, and what needs it."""

    name: str
    least: tuple[int, ...]
    why: str


NEEDED = (
    NeededPackage("torch", (2, 11), "everything"),
    NeededPackage("triton", (3, 6), "the kernels"),
    NeededPackage("numpy", (), "the engine"),
    NeededPackage("msgspec", (), "the engine"),
    NeededPackage("llguidance", (), "the engine"),
    NeededPackage("xxhash", (), "the engine"),
    NeededPackage("protobuf", (7, 35, 1), "the messages in protocol/wire"),
    NeededPackage("safetensors", (), "the loader of weights"),
    NeededPackage("tokenizers", (), "the benchmark of speculation"),
    NeededPackage("rich", (), "tables"),
    NeededPackage("pytest", (), "the tests that need a GPU"),
    NeededPackage("hypothesis", (), "the tests that need a GPU"),
)

INSTALL = """\
With a network:    python -m pip install {names}
Without one, where a network is (the same Python version and processor as on the GPU's machine):
                   python -m pip download --no-deps -d wheels {names}
and on the GPU's machine, beside the folder `wheels`:
                   python -m pip install --no-index --no-deps --find-links wheels {names}"""


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for "2.13.0+cu130"."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def missing_packages(needed: Sequence[NeededPackage] = NEEDED) -> list[str]:
    """Return a line for each package that this interpreter lacks, or has too old."""
    lines = []
    for package in needed:
        least = ".".join(map(str, package.least))
        wanted = f"{package.name}>={least}" if least else package.name
        try:
            found = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            lines.append(f"{wanted}: not installed; used by {package.why}")
            continue
        if version_numbers(found) < package.least:
            lines.append(f"{wanted}: {found} is installed, too old for {package.why}")
    return lines


def how_to_install(lines: list[str]) -> str:
    """Return the commands that install the packages of ``missing_packages``."""
    return INSTALL.format(names=" ".join(f"'{line.split(':')[0]}'" for line in lines))


def missing_text(device: str) -> str:
    """Return everything that is missing to measure ``device``, with the remedies; empty if nothing
    is. Only kernels on a GPU need what is no package."""
    texts = []
    if packages := missing_packages():
        lines = "\n".join(f"  {line}" for line in packages)
        texts.append(f"packages are missing:\n{lines}\n{how_to_install(packages)}")
    if device.startswith("cuda"):
        texts += map(str, missing_build_tools())
    return "\n".join(texts)
