"""A program for ``ChildPool`` that answers each request after as many seconds as it names."""

from __future__ import annotations

import time

from router.common.child_program import ChildWire


def main() -> None:
    wire = ChildWire()

    def answer(line: bytes) -> None:
        time.sleep(float(line))
        wire.send("awake")

    wire.say_ready()
    wire.serve(1 << 30, answer)


if __name__ == "__main__":
    main()
