"""Says what a machine lacks to compile Triton's C module. Needs the standard library only.

Triton launches kernels through a module for CPython that it compiles when the first kernel of a
process is launched, and keeps in TRITON_CACHE_DIR (triton/runtime/build.py). Without a C compiler
and Python.h that launch fails, after the weights have been loaded. So ``prepare_gpu``, the doctor
and ``python -m bench.gpu`` ask here first, whether or not the module is in the cache.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple


class MissingTool(NamedTuple):
    """What is missing, and how to get it on Debian and Ubuntu."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def missing_build_tools() -> tuple[MissingTool, ...]:
    """Return what Triton would not find on this machine; empty if it finds everything."""
    return tuple(tool for tool in (_missing_compiler(), _missing_header()) if tool is not None)


def _missing_compiler() -> MissingTool | None:
    """Triton takes the program that CC names, else gcc, else clang."""
    remedy = "install the Debian packages gcc and libc6-dev"
    chosen = os.environ.get("CC")
    if chosen is not None:
        if shutil.which(chosen):
            return None
        text = (
            f"CC is {chosen!r}, which is not a program; Triton needs a C compiler to launch kernels"
        )
        return MissingTool(text, f"unset CC; without gcc, {remedy}")
    if shutil.which("gcc") or shutil.which("clang"):
        return None
    text = "there is no C compiler (gcc or clang), which Triton needs to launch kernels"
    return MissingTool(text, remedy)


def _missing_header() -> MissingTool | None:
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # of Debian's Python; the headers are not below /usr/local
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if header.is_file():
        return None
    text = f"there is no {header}, which Triton needs to launch kernels"
    own = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    remedy = f"install the Debian package python3-dev, or {own} if another Python is the default"
    return MissingTool(text, remedy)
