"""What engines on a CPU take of memory, beside what engine/sizing.py predicts.

    python -m bench.engine_memory [--seconds S]

For the demo model and a random one of 100 M parameters, with the sizes of ``CASES``: a process
loads the model, writes the whole KV pool and the slots, runs its largest batch for S seconds, and
reads its resident set. The exit status says whether every prediction is within 15%.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.random_model import SHAPE_100M, make
from cluster.models import demo_path
from engine.checkpoint import load_config
from engine.shards import read_shards
from engine.sizing import footprint
from engine.spec import EngineSpec
from protocol.request import Request, Sampling

CASES: list[dict[str, Any]] = [
    {},
    {"role": "prefill"},
    {"kv_tokens": 2048, "max_batch": 8, "chunk": 64},
    {"kv_tokens": 40_000, "max_batch": 16},
    {"dtype": "bfloat16"},
    {"kv_storage": "fp8"},
]
BOUND = 0.15


def child(spec: EngineSpec, seconds: float) -> int:
    """Resident bytes of this process when it has used all that the engine may."""
    from cluster.engine_main import POLICIES
    from engine.arena import Arena
    from engine.loading import load

    arena = Arena.create(spec.arena)
    engine = load(spec, POLICIES[spec.role], lambda what, done: None).engine
    pool: Any = engine.pool
    for tensor in [pool.tensor] if hasattr(pool, "tensor") else [pool.payload, pool.exponents]:
        tensor.fill_(0)
    arena.view[:] = bytes(len(arena.view))
    draw = random.Random(0)
    sampling = Sampling(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True)
    for handle in range(1, spec.max_batch + 1):
        prompt = tuple(draw.choices(range(1000), k=min(512, engine.config.max_model_len // 2)))
        request = Request(id="", prompt=prompt, sampling=sampling, cache_root=os.urandom(16))
        engine.generate(handle, request)
    end = time.monotonic() + seconds
    while time.monotonic() < end and (plan := engine.plan()):
        engine.run(plan)
    return int(psutil.Process().memory_info().rss)


def measure(spec: EngineSpec, seconds: float) -> int:
    """``child`` in a process of its own."""
    command = [sys.executable, "-m", "bench.engine_memory", "--seconds", str(seconds), "--child"]
    run = subprocess.run(
        command, input=msgspec.json.encode(spec), stdout=subprocess.PIPE, check=True, timeout=300
    )
    return int(run.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(
            child(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSpec), arguments.seconds)
        )
        return 0
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": demo_path(), "100M": make(Path(folder) / "model", SHAPE_100M)}
        for name, path in models.items():
            config, shards = load_config(path), read_shards(path)
            for case in CASES:
                sizes = {"role": "decode", "device": "cpu", "threads": 1, **case}
                spec = EngineSpec(model_path=str(path), **sizes)
                predicted = footprint(spec, config, shards, "cpu")
                measured = measure(spec, arguments.seconds)
                error = predicted.total / measured - 1
                worst = max(worst, abs(error))
                print(
                    f"{name:<5} predicted {predicted.total / 2**20:6.0f} MiB, measured"
                    f" {measured / 2**20:6.0f} MiB, {error:+6.1%}  {json.dumps(case)}",
                    flush=True,
                )
    print(f"largest error {worst:.1%}, bound {BOUND:.0%}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
