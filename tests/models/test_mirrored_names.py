"""The methods that the model's docstrings name exist: who renames one looks at the model, too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from decode_worker.handover import Handover
from decode_worker.request import DecodeRequest
from decode_worker.router_link import RouterLink
from decode_worker.service import DecodeService
from engine.execution.engine import Engine
from engine.process.session import EngineSession
from kvtransfer.inbound import InboundTransfer
from kvtransfer.prefill_call import PrefillRunCall
from prefill_worker.served_call import ServedCall
from prefill_worker.service import PrefillService
from router.generation.choice_stream import ChoiceStream
from router.generation.placer import Placer
from router.generation.submission import Submission, TokenQueue
from router.workers.decode_link import DecodeLink

MIRRORED: dict[str, type] = {
    mirrored.__name__: mirrored
    for mirrored in (
        *(ChoiceStream, Placer, Submission, TokenQueue, DecodeLink),
        *(DecodeService, RouterLink, DecodeRequest, Handover),
        *(PrefillRunCall, InboundTransfer, PrefillService, ServedCall),
        *(Engine, EngineSession),
    )
}
FILES = sorted(Path(__file__).parent.glob("handover_*.py"))

_NAMED = re.compile(r"\b([A-Z]\w+)\.(\w+)|(?<=[ ,])\.(\w+)")


def named_methods(path: Path) -> list[tuple[str, str]]:
    """Return (class, method) of each "Class.method" and each ".method" after it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            owner = ""
            for match in _NAMED.finditer(ast.get_docstring(node) or ""):
                owner = match[1] or owner
                found.append((owner, match[2] or match[3]))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_methods_that_the_model_mirrors_exist(path: Path) -> None:
    for owner, method in named_methods(path):
        assert owner in MIRRORED, f"{owner}.{method}"
        assert hasattr(MIRRORED[owner], method), f"{owner}.{method}"


def test_the_model_names_what_it_mirrors() -> None:
    assert len({name for path in FILES for name in named_methods(path)}) > 30
