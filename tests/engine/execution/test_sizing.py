"""What speculation adds to the memory of a step."""

from __future__ import annotations

import pytest

from cluster.models import models
from engine.execution.memory_footprint import Footprint, footprint
from engine.ipc.spec import EngineSpec, SpeculationMethod, SpeculationSpec
from engine.model_config.checkpoint import load_config
from engine.scheduling.sequence import MOST_NODES

DEMO = models.demo_path()


def sized(method: SpeculationMethod, max_batch: int, max_tokens: int) -> Footprint:
    speculation = SpeculationSpec(method=method, max_tokens=max_tokens)
    spec = EngineSpec(
        model_path=str(DEMO), role="decode", max_batch=max_batch, chunk=64, speculation=speculation
    )
    return footprint(spec, load_config(DEMO), None, "cuda")


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(1, 1), (4, 8), (16, 16), (64, 8)])
def test_every_node_takes_a_row_of_logits(max_batch: int, max_tokens: int) -> None:
    plain, with_nodes = (sized(m, max_batch, max_tokens) for m in ("off", "ngram"))
    nodes = min(max_batch * max_tokens, MOST_NODES)
    logits = 4 * load_config(DEMO).vocab_size  # of a row in fp32, once at least
    more = with_nodes.workspace - plain.workspace
    assert nodes * logits < more < 20 * nodes * logits
    assert with_nodes.kv == plain.kv and with_nodes.weights == plain.weights


def test_nodes_beyond_what_a_step_has_take_nothing() -> None:
    assert sized("ngram", 64, 4).workspace == sized("ngram", 64, 16).workspace


def test_what_cannot_draft_takes_nothing() -> None:
    assert sized("draft", 8, 8) == sized("off", 8, 8)  # no folder is given
