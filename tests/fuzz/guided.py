"""Fuzzes one target for a number of seconds: with atheris by coverage, else by plain changes.

atheris (libFuzzer for Python) is installed by `make test-long` from requirements-fuzz.txt. It has
wheels for Linux on x86-64 alone, so elsewhere kept inputs are changed at random instead, and the
output says so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from random import Random

from tests.fuzz.mutation import mutate
from tests.fuzz.target import CORPUS, FuzzTarget, load_target, run_within_budget

INSTRUMENTED = [
    "cluster",
    "decode_worker",
    "engine.model_config",
    "kvtransfer",
    "prefill_worker",
    "protocol",
    "router",
]
"""Packages whose branches guide the search."""


def fuzz(name: str, seconds: int) -> int:
    """Fuzz a target; return the exit status, which is not 0 when an input has failed."""
    folder = Path(tempfile.mkdtemp(prefix=f"baton-fuzz-{name}-"))
    if find_spec("atheris") is None:
        print("fuzz: atheris is not installed (requirements-fuzz.txt): not guided by coverage")
        return _change_at_random(load_target(name), seconds, folder)
    return _guided_by_coverage(name, seconds, folder)


def _guided_by_coverage(name: str, seconds: int, folder: Path) -> int:
    import atheris  # type: ignore[import-untyped,unused-ignore]

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = load_target(name)
    kept = [path.read_bytes() for path in target.corpus]

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.randrange(8):
            return bytes(atheris.Mutate(data, max_size))
        return mutate(data, kept, random)[:max_size]

    found = folder / "found"
    found.mkdir()
    options = [
        *(sys.argv[0], str(found), str(CORPUS / name)),
        *(f"-max_total_time={seconds}", "-max_len=16384"),
        *("-timeout=30", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/failed-"),
        *("-print_final_stats=1", "-verbosity=1"),
    ]
    print(f"fuzz: {name}: inputs that fail are written to {folder}", flush=True)
    atheris.Setup(options, lambda data: run_within_budget(target, data), custom_mutator=change)
    atheris.Fuzz()  # ends the process, with 0 unless an input has failed
    return 0


def _change_at_random(target: FuzzTarget, seconds: int, folder: Path) -> int:
    kept = [path.read_bytes() for path in target.corpus]
    seed = time.time_ns()
    random = Random(seed)
    deadline, runs = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        data = mutate(random.choice(kept), kept, random)
        try:
            run_within_budget(target, data)
        except Exception:
            path = folder / "failed"
            path.write_bytes(data)
            print(f"fuzz: {target.name}: failed after {runs} inputs (seed {seed}): {path}")
            raise
        runs += 1
    print(f"fuzz: {target.name}: {runs} inputs in {seconds} s, none failed (seed {seed})")
    return 0
