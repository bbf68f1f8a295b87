"""Compiles, without a GPU, every kernel that the shapes of served models need.

    python -m tests.kernels.compiling 90      for sm_90; prints a line for each specialisation

The product's own launch functions run on CPU tensors of full size (their memory is never touched),
with a driver that names the GPU and with launches that compile and do nothing else. So what is
compiled is what a GPU would compile: the same types, alignments and constants.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class CompiledSpecialisation(msgspec.Struct, frozen=True):
    """One kernel as it was compiled for one set of types and constants; memory in bytes."""

    kernel: str
    case: str
    registers: int  # of a thread
    stack: int  # of a thread: spilled registers, among others
    shared: int  # of a program
    warps: int
    widest: int  # bytes that one instruction reads or writes in global memory, at most


class _OneGpu:
    """A driver with one GPU that cannot run anything."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_cases(
    arch: int, cases: dict[str, Callable[[], None]]
) -> Iterator[CompiledSpecialisation]:
    """Yield every specialisation that the launches of ``cases`` need on ``sm_{arch}``."""
    triton.runtime.driver.set_active(_OneGpu(GPUTarget("cuda", arch, 32)))
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    seen: set[str] = set()
    for case, launch in cases.items():
        compiled.clear()
        launch()
        assert compiled, f"{case} launches no kernel"
        for kernel in compiled:
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                yield _describe(kernel, case)


def _describe(kernel: Any, case: str) -> CompiledSpecialisation:
    usage = _resource_usage(kernel.asm["cubin"])
    return CompiledSpecialisation(
        kernel=kernel.metadata.name,
        case=case,
        registers=usage["REG"],
        stack=usage["STACK"],
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        widest=_widest_access(kernel.asm["ptx"]),
    )


def _widest_access(ptx: str) -> int:
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[a-z](\d+)\s", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in accesses), default=0)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return what cuobjdump, which Triton brings along, says of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    fields = [part.split(":") for line in text.splitlines() for part in line.split()]
    return {f[0]: int(f[1]) for f in fields if len(f) == 2 and f[1].isdigit()}


def main() -> None:
    from tests.kernels.cases import product_cases, take_capability

    arch = int(sys.argv[1])
    take_capability(arch)
    for each in compile_cases(arch, product_cases()):
        print(json.dumps(msgspec.to_builtins(each)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
