"""bench.speculation.gpu runs to its end without a GPU, on a tiny shape."""

from __future__ import annotations

import json

import pytest

from bench.speculation.gpu import main


def test_the_whole_benchmark_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu", "--tiny"])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["bench"] == "speculation_gpu"
    rows = {row["name"]: row for row in result["rows"]}
    for batch in (1, 3):
        synthetic = rows[f"synthetic acceptance 0.8, batch {batch}, K=2"]
        assert synthetic["value"] > 0 and synthetic["ratio"] > 0
        assert "a=1.00" in rows[f"ngram, copying, batch {batch}, K=2"]["against"]
        assert rows[f"ngram, copying, batch {batch}, controller"]["value"] > 0
