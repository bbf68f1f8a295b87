"""The tests that need a GPU, and those of the kernels, which run natively on one.

Only the folders that hold such tests are given to pytest: the others import packages that a machine
with a bare GPU does not have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.part import GpuResult, PartContext
from bench.gpu.results import ROOT

MARK = "mark.gpu"


def marked_paths(tests: Path) -> list[str]:
    """Return the test files with the mark ``gpu``, and the folders whose conftest.py has it."""
    files = [path for path in tests.rglob("*.py") if MARK in path.read_text()]
    folders = {path.parent for path in files if path.name == "conftest.py"}
    single = [path for path in files if path.parent not in folders]
    return [str(path.relative_to(tests.parent)) for path in sorted([*folders, *single])]


def measure_tests(context: PartContext) -> None:
    """Run the part ``tests``; raise SystemExit if one failed, after all of them have run."""
    suites: dict[str, list[str]]
    if context.on_cpu:
        suites = {"gpu": ["-m", "not gpu", "tests/gpu/test_ceilings.py"]}
    else:
        marked = marked_paths(ROOT / "tests")
        suites = {"gpu": ["-m", "gpu", *marked], "kernels": ["tests/kernels"]}
    failed = [name for name, arguments in suites.items() if not _run(context, name, arguments)]
    if failed:
        sys.exit(f"tests failed: {', '.join(failed)}")


def _run(context: PartContext, name: str, arguments: Sequence[str]) -> bool:
    """Run pytest, add its counts, and return whether no test failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-W", "ignore::pytest.PytestConfigWarning"]
        # Plugins of other packages would only bring their own needs.
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment.pop("TRITON_INTERPRET", None)  # tests/kernels decides itself
        subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=environment)
        counts = read_counts(report.read_text()) if report.is_file() else {}
    ran = counts.get("tests", 0) - counts.get("skipped", 0)
    wrong = counts.get("failures", 0) + counts.get("errors", 0)
    if not counts:
        context.note(f"pytest {name}: it wrote no report")
        return False
    text = f"{ran} ran, {counts['skipped']} skipped, {counts['time']} s"
    share = (ran - wrong) / ran if ran else 0.0
    context.add(GpuResult(f"tests, {name}: passed", ran - wrong, "tests", text, share, 1.0))
    return not wrong and ran > 0


def read_counts(report: str) -> dict[str, int]:
    """Return tests, failures, errors, skipped and whole seconds of a report in JUnit's format."""

    def numbers() -> Iterator[tuple[str, int]]:
        suites = list(ElementTree.fromstring(report).iter("testsuite"))
        for key in ("tests", "failures", "errors", "skipped", "time"):
            yield key, int(sum(float(suite.get(key, 0)) for suite in suites))

    return dict(numbers())
