"""All measurements that need a GPU, in one command of at most 25 minutes.

    python -m bench.gpu                              everything that was not measured before
    python -m bench.gpu --only decode --profile      one part, with the kernels of its steps
    python -m bench.gpu --device cpu --tiny          the same code, to see that it runs

It needs one CUDA GPU with some 80 GB, torch, Triton and this tree; no Ray, no Redis, no network and
no model files. Triton needs a C compiler and Python.h (the Debian packages gcc and python3-dev) to
launch kernels on a GPU. The packages are in bench/gpu/requirements.py; without a network they are
installed from a folder of wheels:

    python -m pip download --no-deps -d wheels msgspec llguidance xxhash 'protobuf>=7.35.1'
    python -m pip install --no-index --no-deps --find-links wheels \\
        msgspec llguidance xxhash protobuf

Each part runs in a process of its own with a time limit, and its rows are added to one JSON file as
soon as it ends. The parts are ordered by worth. The same command again measures only what is
missing: parts that failed, for which no time was left, or whose sources or GPU have changed. With
``--minutes 9`` it stops in time where a command may take ten. At the end the Markdown table for
docs/benchmarks.md is printed. The exit status is 1 if a part is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.requirements import missing_text
from bench.gpu.results import ROOT, ResultFile, commit, markdown, source_hash
from bench.gpu.runner import GpuPart, PartRunner, RunOptions

PARTS = (
    GpuPart("limits", "bench.gpu.parts.limits:measure_machine", 90),
    GpuPart("decode", "bench.gpu.parts.decode:measure_decode", 360),
    GpuPart("tests", "bench.gpu.parts.suites:measure_tests", 360),
    GpuPart("prefill", "bench.gpu.parts.prefill:measure_prefill", 180),
    GpuPart("kernels", "bench.gpu.parts.kernels:measure_kernels", 180),
    GpuPart("kv", "bench.gpu.parts.kv_arrival:measure_arrival", 180),
    GpuPart("speculation", "bench.gpu.parts.speculation:measure_speculation", 240),
    GpuPart("handover", "bench.gpu.parts.handover:measure_handover", 180),
    GpuPart("peers", "bench.gpu.parts.peers:measure_peers", 240),
)
"""By worth; the limits come first, because the others are compared with them."""

MINUTES = 25.0


def describe(device: str) -> dict[str, Any]:
    """Return the description of the machine. Exit with its message if there is no such device."""
    command = [sys.executable, "-m", "bench.gpu.parts.limits", device]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(found.stderr.strip() or f"{device} cannot be used")
    about: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return {**about, "commit": commit()}


def chosen_parts(names: Sequence[str]) -> list[GpuPart]:
    return [part for part in PARTS if part.name in names or not names]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (the default), cuda:1 or cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=[part.name for part in PARTS], help="these parts"
    )
    parser.add_argument("--again", action="store_true", help="measure parts that are done as well")
    parser.add_argument("--profile", action="store_true", help="print the kernels of decode again")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"at most; {MINUTES:g}")
    parser.add_argument("--out", type=Path, default=ROOT / ".baton" / "bench_gpu.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    chosen = parse(arguments)
    deadline = time.monotonic() + 60 * chosen.minutes
    if missing := missing_text(chosen.device):
        raise SystemExit(missing)
    results = ResultFile(chosen.out)
    results.machine = describe(chosen.device)
    options = RunOptions(
        chosen.device, chosen.tiny, chosen.again or chosen.profile, chosen.profile, deadline
    )
    parts = chosen_parts(chosen.only or (["decode"] if chosen.profile else []))
    runner = PartRunner(results, options, source_hash())
    done = runner.run(parts)
    print("", *markdown(results, [part.name for part in PARTS], runner.key), "", sep="\n")
    print(f"results: {chosen.out}")
    raise SystemExit(0 if done else 1)


if __name__ == "__main__":
    main()
