"""The machine: its description, and the limits that the other parts compare with.

``python -m bench.gpu.parts.limits DEVICE`` prints the description as JSON. The command starts it,
because a process that has used CUDA keeps some memory of the GPU.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata

import torch

from bench.gpu.part import GpuResult, PartContext


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return the names and versions that figures depend on."""
    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["gpu"] = f"{about.name} ({about.total_memory / 2**30:.0f} GiB)"
        found["cuda"] = str(torch.version.cuda)
    else:
        found["gpu"] = "a CPU"
    return found


def measure_machine(context: PartContext) -> None:
    """Measure the part ``limits``."""
    limits = context.measure_limits()
    context.add(
        GpuResult("bandwidth", limits.bandwidth / 1e9, "GB/s"),
        GpuResult("rate of products", limits.rate / 1e12, "TFLOP/s"),
    )


def main() -> None:
    device = torch.device(sys.argv[1])
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; `--device cpu --tiny` runs the same code without one")
    print(json.dumps(describe_machine(device)))


if __name__ == "__main__":
    main()
