"""KV between two processes: each carrier, beside the bare media and NIXL.

    python -m bench.kv_link [--quick] [--part carriers|pools|tail ...] [--nixl-python PATH]

PATH is the interpreter of a virtual environment with ``nixl-cu12==1.5.1`` and torch. The carrier
``nixl`` takes part if the interpreter of the benchmark has that package, too, and UCX_TLS is set or
the host has an RDMA device; ``nccl`` with its code over gloo.

Sender and receiver are processes of this machine. Each of the product's transfers has a real
Prefill.Run call, with real credits and checks. All contestants take turns, so that a machine that
becomes busy slows all of them, and medians are compared.

``carriers``: from filled slots of the sender to checked slots of the receiver, between fronts
without engines. For ``local``, the receiver copies the frames out of the sender's memory and checks
the copies. Bare media move one buffer into another, and check nothing.
``pools``: from the sender's pool to the receiver's, encoded and decoded, between fronts with engine
processes that have the real copy thread and no model. The rate is that of the raw KV, so that
codecs compare. First, the KV that arrives is compared with the KV that was sent.
``tail``: the time from the first token until the last KV is there, for a prompt of 8,192 tokens in
paced steps: over each carrier here, and of the real queues and credits in simulated time over links
that this machine does not have.

CPU seconds per GB are those of all processes of both ends.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from bench.kv_link import carriers_part, pools_part, tail_part
from bench.kv_link.field import LinkField
from bench.kv_link.other_load import OtherLoad
from bench.lib.report import ResultRow, finish

PARTS: Final = {
    "carriers": carriers_part.measure,
    "pools": pools_part.measure,
    "tail": tail_part.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, two sizes, no TLS")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: all")
    parser.add_argument("--nixl-python", type=Path)
    options = parser.parse_args()
    field = LinkField()
    rows: list[ResultRow] = []
    try:
        shapes = ["8B"] if options.quick else ["8B", "demo"]
        field.open(shapes, tls=not options.quick, nixl_python=options.nixl_python)
        for line in field.left_out:
            print(f"left out: {line}")
        aims: list[str] = []
        for part in options.part or PARTS:
            load = OtherLoad()
            found = PARTS[part](field, quick=options.quick)
            rows += [*found.rows, ResultRow(f"{part}: cores used by others", load.cores(), "")]
            aims += found.aims
    finally:
        field.close()
    finish("kv_link", rows)
    for aim in aims:
        print(aim)


if __name__ == "__main__":
    main()
