"""Runs seeds of the simulator: ``python -m tests.simulation --seed 17 --trace``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.runner import Simulation

CLOCK = time.perf_counter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    parser.add_argument("--trace", action="store_true", help="print what happened in each")
    options = parser.parse_args()
    simulation, failed = Simulation(), 0
    outcomes: Counter[str] = Counter()
    began = CLOCK()
    with simulation.patched():
        for seed in range(options.seed, options.seed + options.count):
            result = simulation.run(seed)
            outcomes.update(o.partition(":")[0] for o in result.outcomes)
            if options.trace:
                print("\n".join(result.trace))
                print(f"{result.events} events, digest {result.digest}")
            if result.violations:
                failed += 1
                print(f"seed {seed}:", *result.violations[:5], sep="\n  ")
    seconds = CLOCK() - began
    print(f"{options.count} seeds in {seconds:.1f} s, {failed} failed; {dict(outcomes)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
