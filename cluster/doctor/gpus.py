"""Checks the GPUs, their driver, and what torch and Triton need to use them; imports neither."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import DoctorSubject
from cluster.local.start_report import format_size
from cluster.serve.ray_runtime import gpu_count
from engine.execution.build_tools import MissingTool, missing_build_tools

_DEADLINE_S = 2.0
_FIELDS = "index,name,memory.total,memory.free,driver_version,uuid"


class GpuDevice(msgspec.Struct, frozen=True):
    """One GPU as nvidia-smi reports it; memory in bytes."""

    index: int
    name: str
    total: int
    free: int
    driver: str
    uuid: str = ""


class GpuFacts(msgspec.Struct, frozen=True):
    """GPUs and CUDA versions. ``driver_cuda``: the newest CUDA that the driver supports.

    ``torch_cuda``: the CUDA that torch was built with, empty for its CPU build. ``error``: why
    nvidia-smi reported nothing. ``missing_tools``: what Triton lacks to launch kernels."""

    visible: int  # number of GPUs that engines would use
    gpus: tuple[GpuDevice, ...] = ()
    driver_cuda: str = ""
    torch_cuda: str = ""
    error: str = ""
    order: str | None = None  # CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs
    missing_tools: tuple[MissingTool, ...] = ()

    def engine_gpus(self, device: str | None) -> tuple[GpuDevice, ...]:
        """Return the GPUs that engines on ``device`` use, in CUDA's order: all that are visible, or
        the N-th of them for cuda:N."""
        names = [str(gpu.index) for gpu in self.gpus]
        if self.order is not None:
            names = [name.strip() for name in self.order.split(",")]
        found = [gpu for name in names for gpu in self.gpus if _is_named(gpu, name)]
        visible = (found if len(found) >= self.visible else list(self.gpus))[: self.visible]
        _, _, index = (device or "").partition(":")
        return tuple(visible[int(index) : int(index) + 1] if index else visible)


def _is_named(gpu: GpuDevice, name: str) -> bool:
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def collect(subject: DoctorSubject) -> GpuFacts:
    return msgspec.structs.replace(_query(subject), missing_tools=missing_build_tools())


def _query(subject: DoctorSubject) -> GpuFacts:
    program, torch_cuda = shutil.which("nvidia-smi"), _torch_cuda()
    visible, order = gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if subject.gpus is not None:  # Ray hides a node's GPUs from the process that checks it
        visible, order = subject.gpus, None
    if program is None:
        error = "nvidia-smi is not installed" if visible else ""
        return GpuFacts(visible, torch_cuda=torch_cuda, error=error)
    try:
        query = _start([program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])
        banner = _start([program])
        rows, text = _output(query), _output(banner)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return GpuFacts(visible, torch_cuda=torch_cuda, error=f"nvidia-smi: {error}")
    found = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", text)
    gpus = tuple(_gpu(row) for row in rows.splitlines() if row.strip())
    cuda = found.group(1) if found else ""
    return GpuFacts(visible, gpus, cuda, torch_cuda, order=order)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise ValueError(text.strip().partition("\n")[0])
    return text


def _gpu(row: str) -> GpuDevice:
    index, name, total, free, driver, uuid = (part.strip() for part in row.split(","))
    return GpuDevice(int(index), name, int(total) << 20, int(free) << 20, driver, uuid)


def _torch_cuda() -> str:
    """Return the CUDA version of the installed torch, read from its version.py."""
    spec = find_spec("torch")
    with contextlib.suppress(OSError):
        text = Path(spec.origin or "").with_name("version.py").read_text() if spec else ""
        if found := re.search(r"^cuda.*=\s*'([\d.]+)'", text, re.MULTILINE):
            return found.group(1)
    return ""


def judge(facts: GpuFacts, subject: DoctorSubject) -> list[Finding]:
    if not facts.visible:
        return [_no_gpu(facts, subject)]
    missing = () if subject.device == "cpu" else facts.missing_tools
    lacks = [problem("gpu", tool.text, tool.remedy) for tool in missing]
    if facts.error:
        return [note("gpu", facts.error, "install the NVIDIA driver's tools"), *lacks]
    return [_build(facts, subject), *lacks, *(_free(gpu) for gpu in facts.gpus)]


def _no_gpu(facts: GpuFacts, subject: DoctorSubject) -> Finding:
    if not (subject.device or "cpu").startswith("cuda"):
        return ok("gpu", "none; engines run on the CPU")
    if facts.gpus and facts.order is None:  # nvidia-smi lists GPUs that /proc does not show
        return note("gpu", f"{len(facts.gpus)} by nvidia-smi, none in /proc/driver/nvidia")
    text = f"worker.device is {subject.device}, but no GPU is visible"
    hidden = "unset CUDA_VISIBLE_DEVICES, which hides them" if facts.gpus else "install its driver"
    return problem("gpu", text, f"{hidden}, or give --device cpu")


def _build(facts: GpuFacts, subject: DoctorSubject) -> Finding:
    on_cpu = "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    if subject.device == "cpu":
        return ok("gpu", f"{facts.visible}, not used")
    if not facts.torch_cuda:
        text = f"{facts.visible} GPU(s), but the installed torch is the CPU build"
        return problem("gpu", text, f"install the CUDA build of torch, or {on_cpu}")
    if facts.driver_cuda and _major(facts.driver_cuda) < _major(facts.torch_cuda):
        text = f"the driver serves CUDA {facts.driver_cuda}, torch needs {facts.torch_cuda}"
        newer = f"install a driver for CUDA {_major(facts.torch_cuda)} or newer"
        build = "or the build of torch for this driver (`make clean up` does it)"
        return problem("gpu", text, f"{newer}, {build}, or {on_cpu}")
    if not facts.engine_gpus(subject.device):
        text = f"worker.device is {subject.device}, but {facts.visible} GPU(s) are visible"
        return problem("gpu", text, f"expected cuda:0 to cuda:{facts.visible - 1}, or cuda")
    return ok("gpu", f"{facts.visible}, torch with CUDA {facts.torch_cuda}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _free(gpu: GpuDevice) -> Finding:
    text = f"{gpu.index}: {gpu.name}, {format_size(gpu.free)} of {format_size(gpu.total)} free"
    if gpu.free < 0.8 * gpu.total:
        return note("gpu", text, "`nvidia-smi` lists the processes that use the rest")
    return ok("gpu", text)
