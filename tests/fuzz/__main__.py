"""Fuzz one target, or all of them one after the other, for some seconds.

    python -m tests.fuzz TARGET --seconds 60     guided by coverage where atheris is installed
    python -m tests.fuzz --list                  the names of the targets
    python -m tests.fuzz TARGET --input FILE     run one input, for example one that has failed

An input that fails is written to the folder that is printed. Fix the defect, then keep the input as
a file of tests/fuzz/corpus/TARGET, so that it is tried in every run of the tests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.guided import fuzz
from tests.fuzz.target import TARGET_NAMES, load_target, run_within_budget


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", nargs="?", choices=TARGET_NAMES)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--input", type=Path)
    options = parser.parse_args()
    if options.list:
        print("\n".join(TARGET_NAMES))
        return 0
    if options.target is None:
        parser.error("name a target; --list shows them")
    if options.input is not None:
        run_within_budget(load_target(options.target), options.input.read_bytes())
        return 0
    return fuzz(options.target, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
