"""Set-up takes the build of torch that the machine's driver can run, or says what is missing."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BANNER = "| NVIDIA-SMI 570.0    Driver Version: 570.0    {} |"
STUB = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n'


def version() -> str:
    [found] = re.findall(r"^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return str(found)


def set_up(folder: Path, nvidia_smi: str | None) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the Makefile's rule for torch with stubs; return the run and what it has called."""
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/created").touch()
    (folder / "path").mkdir()
    stubs = [folder / "venv/bin/python", folder / "venv/bin/uv"]
    for stub in stubs:
        stub.write_text(STUB)
    smi = folder / "path/nvidia-smi"
    listed = "exit 9" if nvidia_smi is None else "echo 'GPU 0: NVIDIA H100'"
    smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] && {{ {listed}; exit; }}\necho "{nvidia_smi}"\n')
    for stub in (*stubs, smi):
        stub.chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    run = subprocess.run(
        ["make", f"VENV={folder}/venv", f"{folder}/venv/torch-{version()}"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{folder}/path:{os.environ['PATH']}", "CALLS": str(calls)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run, calls.read_text()


@pytest.mark.parametrize(
    "told", ["CUDA Version: 13.0", "CUDA UMD Version: 13.2", "CUDA Version: 14.1", "CUDA: N/A"]
)
def test_recent_driver_gets_the_build_of_the_index(tmp_path: Path, told: str) -> None:
    run, calls = set_up(tmp_path, BANNER.format(told))
    assert run.returncode == 0, run.stderr
    assert f"install torch=={version()}\n" in calls and "uv " not in calls


@pytest.mark.parametrize("told", ["CUDA Version: 12.2", "CUDA Version: 12.8"])
def test_driver_of_cuda_12_gets_a_build_for_cuda_12(tmp_path: Path, told: str) -> None:
    run, calls = set_up(tmp_path, BANNER.format(told))
    assert run.returncode == 0, run.stderr
    [call] = calls.splitlines()
    assert call.startswith("uv pip install") and "--torch-backend=cu126" in call
    assert call.endswith(f"torch=={version()}")
    assert f"the driver serves {told.replace(' Version:', '')}" in run.stdout


def test_older_driver_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    run, calls = set_up(tmp_path, BANNER.format("CUDA Version: 11.4"))
    assert run.returncode != 0 and not calls
    assert "the driver serves CUDA 11.4" in run.stdout
    assert "install a newer NVIDIA driver" in run.stdout


def test_machine_without_a_gpu_gets_the_cpu_build(tmp_path: Path) -> None:
    run, calls = set_up(tmp_path, None)
    assert run.returncode == 0, run.stderr
    assert f"install --no-compile torch=={version()}+cpu\n" in calls
