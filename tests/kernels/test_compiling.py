"""Every kernel compiles for the GPUs of a fleet, with bounded registers, without spilling."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from tests.kernels.compiling import CompiledSpecialisation

KERNELS = {
    *("add_rms_norm", "gate", "rotate_and_store", "gather_tokens", "write_step_inputs"),
    *("attention_pieces", "merge_pieces", "draw_tiles", "draw_winners", "accept_paths"),
    *("move_slots", "_copy_frames", "_check_frames"),
}
MOST_SHARED = 100 << 10
"""Bytes of a program: an sm_80 has 164 KiB, so that one program at least fits beside another."""

MOST_STACK = 104
"""Bytes of a thread: a spilled register costs a trip to the L1 cache. Only kernels for many drafts
or for runs of a prompt spill."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [90, 80])
def test_every_kernel_compiles(arch: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling", str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"\nsm_{arch}")
    found = [
        msgspec.json.decode(line, type=CompiledSpecialisation) for line in done.stdout.splitlines()
    ]
    for each in found:
        print(
            f"{each.kernel:18} {each.registers:4} registers {each.shared:7} bytes shared"
            f" {each.stack:4} bytes spilled  {each.case}"
        )
    assert {each.kernel for each in found} >= KERNELS
    assert [each for each in found if each.stack > MOST_STACK] == []
    # Also frames with some of the pool's heads move 16 bytes with each instruction.
    frames = [each for each in found if each.kernel in ("_copy_frames", "_check_frames")]
    assert [each for each in frames if each.widest != 16] == []
    assert [each for each in found if each.shared > MOST_SHARED] == []
