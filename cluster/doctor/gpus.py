"""GPUs, their driver, and whether the installed torch can use them. Without torch."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import Wanted
from cluster.local.start_report import size
from cluster.serve.ray_runtime import gpu_count

_DEADLINE_S = 2.0
_FIELDS = "index,name,memory.total,memory.free,driver_version"


class Gpu(msgspec.Struct, frozen=True):
    """Memory in bytes."""

    index: int
    name: str
    total: int
    free: int
    driver: str


class Gpus(msgspec.Struct, frozen=True):
    """``driver_cuda``: the newest CUDA that the driver serves; ``torch_cuda``: the one that torch
    was built with, empty for its CPU build. ``error``: why nvidia-smi told nothing."""

    visible: int  # that engines would use
    gpus: tuple[Gpu, ...] = ()
    driver_cuda: str = ""
    torch_cuda: str = ""
    error: str = ""


def collect(_: Wanted) -> Gpus:
    program, visible, torch_cuda = shutil.which("nvidia-smi"), gpu_count(), _torch_cuda()
    if program is None:
        error = "nvidia-smi is not installed" if visible else ""
        return Gpus(visible, torch_cuda=torch_cuda, error=error)
    try:
        query = _start([program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])
        banner = _start([program])
        rows, text = _output(query), _output(banner)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Gpus(visible, torch_cuda=torch_cuda, error=f"nvidia-smi: {error}")
    found = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", text)
    gpus = tuple(_gpu(row) for row in rows.splitlines() if row.strip())
    return Gpus(visible, gpus, found.group(1) if found else "", torch_cuda)


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


def _gpu(row: str) -> Gpu:
    index, name, total, free, driver = (part.strip() for part in row.split(","))
    return Gpu(int(index), name, int(total) << 20, int(free) << 20, driver)


def _torch_cuda() -> str:
    """CUDA of the torch that is installed, from the file where it says so."""
    spec = find_spec("torch")
    with contextlib.suppress(OSError):
        text = Path(spec.origin or "").with_name("version.py").read_text() if spec else ""
        if found := re.search(r"^cuda.*=\s*'([\d.]+)'", text, re.MULTILINE):
            return found.group(1)
    return ""


def judge(facts: Gpus, wanted: Wanted) -> list[Finding]:
    if not facts.visible:
        return [ok("gpu", "none; engines run on the CPU")]
    if facts.error:
        return [note("gpu", facts.error, "install the NVIDIA driver's tools")]
    return [_build(facts, wanted), *(_free(gpu) for gpu in facts.gpus)]


def _build(facts: Gpus, wanted: Wanted) -> Finding:
    on_cpu = "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    if wanted.device == "cpu":
        return ok("gpu", f"{facts.visible}, not used")
    if not facts.torch_cuda:
        text = f"{facts.visible} GPU(s), but the installed torch is the CPU build"
        return problem("gpu", text, f"install the CUDA build of torch, or {on_cpu}")
    if facts.driver_cuda and _major(facts.driver_cuda) < _major(facts.torch_cuda):
        text = f"the driver serves CUDA {facts.driver_cuda}, torch needs {facts.torch_cuda}"
        return problem("gpu", text, f"install a newer driver, or {on_cpu}")
    return ok("gpu", f"{facts.visible}, torch with CUDA {facts.torch_cuda}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _free(gpu: Gpu) -> Finding:
    text = f"{gpu.index}: {gpu.name}, {size(gpu.free)} of {size(gpu.total)} free"
    if gpu.free < 0.8 * gpu.total:
        return note("gpu", text, "`nvidia-smi` shows who uses the rest")
    return ok("gpu", text)
