"""The Triton kernels of the engine, one at a time, beside torch and the bandwidth of the machine.

On a GPU the calls are recorded in a CUDA graph, as in a decode step, so that no launch counts. A
graph goes through several copies of its tensors, which together exceed the L2 cache. The ratio is
that of the bytes over the bandwidth of a large copy to the time taken. On a CPU the kernels run
under Triton's interpreter, to see that this module fits them.
"""

from __future__ import annotations

import sys
import traceback

from bench.gpu.part import GpuResult, PartContext
from bench.gpu.parts.kernel_cases import (
    CaseBuilder,
    KernelCase,
    KernelSizes,
    NumberedCall,
    case_builders,
)
from bench.lib.roofline import recorded_seconds, seconds

FULL = KernelSizes(
    *(32, 8, 128, 4096, 14336, 128256, 32),
    attention=((1, 1, 8192), (64, 1, 2048), (64, 1, 8192), (16, 1, 32768), (16, 5, 2048)),
    rows=(1, 64, 2048),
    drawing=(1, 64),
    gathered=8192,
    frames=64,
)
TINY = KernelSizes(4, 2, 16, 64, 160, 640, 2, ((2, 1, 64), (1, 3, 40)), (3,), (2,), 64, 2)

REPEATS = 20
LEAST_CALLS = 32
"""Calls of one measurement, so that starting and ending it do not count."""


def measure_kernels(context: PartContext) -> None:
    """Measure the part ``kernels``. A kernel that fails leaves out its row alone; the part fails at
    its end then."""
    builders = case_builders(TINY if context.tiny else FULL, context)
    failed = [problem for builder in builders if (problem := _try(context, builder))]
    if failed:
        sys.exit("\n".join(failed))


def _try(context: PartContext, builder: CaseBuilder) -> str:
    """Measure one case, and return its error, or "" without one."""
    try:
        _add(context, builder())
    except Exception as error:  # whatever a kernel raises, the others are measured
        traceback.print_exc()
        return f"{builder.func.__name__}{builder.args[2:]}: {type(error).__name__}: {error}"
    return ""


def _add(context: PartContext, case: KernelCase) -> None:
    taken = _time(context, case, case.run)
    reference = _time(context, case, case.reference)
    floor = case.nbytes / context.limits.bandwidth
    text = f"{case.against} {reference * 1e6:.4g} us; {case.nbytes / taken / 1e9:.4g} GB/s"
    context.add(GpuResult(case.name, taken * 1e6, "us", text, floor / taken))


def _time(context: PartContext, case: KernelCase, call: NumberedCall) -> float:
    """Return the median seconds of one call."""

    calls, repeats = (1, 1) if context.on_cpu else (max(LEAST_CALLS, case.copies), REPEATS)

    def every() -> None:
        for i in range(calls):
            call(i % case.copies)

    measure = recorded_seconds if case.recorded else seconds
    return measure(every, context.device, repeats) / calls
