"""What speculation adds to the memory of a step."""

from __future__ import annotations

import pytest

from bench.lib.settings import engine_settings, speculation_settings
from cluster.models import locate
from engine.execution.memory_footprint import Footprint, estimate_footprint
from engine.ipc.settings import SpeculationMethod
from engine.model_config.checkpoint import load_config
from engine.scheduling.draft_pages import MAX_DRAFT_NODES

DEMO = locate.demo_path()


def sized(method: SpeculationMethod, max_batch: int, max_tokens: int) -> Footprint:
    speculation = speculation_settings(method, max_tokens=max_tokens)
    spec = engine_settings(
        str(DEMO), max_batch=max_batch, prefill_chunk=64, speculation=speculation
    )
    return estimate_footprint(spec, load_config(DEMO), None, "cuda")


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(1, 1), (4, 8), (16, 16), (64, 8)])
def test_every_draft_node_needs_a_row_of_logits(max_batch: int, max_tokens: int) -> None:
    plain, with_nodes = (sized(m, max_batch, max_tokens) for m in ("off", "ngram"))
    nodes = min(max_batch * max_tokens, MAX_DRAFT_NODES)
    logits = 4 * load_config(DEMO).vocab_size  # of a row in fp32, once at least
    more = with_nodes.workspace - plain.workspace
    assert nodes * logits < more < 20 * nodes * logits
    assert with_nodes.kv == plain.kv and with_nodes.weights == plain.weights


def test_draft_nodes_beyond_the_step_limit_need_no_memory() -> None:
    assert sized("ngram", 64, 4).workspace == sized("ngram", 64, 16).workspace


def test_method_without_drafts_needs_no_memory() -> None:
    assert sized("draft", 8, 8) == sized("off", 8, 8)  # no folder is given
