"""Every target holds for its kept inputs and for a few hundred changed ones.

`make test-long` runs the same targets for a minute each, guided by coverage.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutation import mutate
from tests.fuzz.target import (
    CORPUS,
    LARGEST_INPUT,
    TARGET_NAMES,
    FuzzTarget,
    load_target,
    run_within_budget,
)

_IS_LONG = settings().max_examples > 1000  # the Hypothesis profile of `make test-long`
_MOST_BYTES = LARGEST_INPUT if _IS_LONG else 4096
_LARGEST_FILE = 4096
_MOST_FILES = 200


def inputs(target: FuzzTarget) -> st.SearchStrategy[bytes]:
    """Kept inputs with changes, and any bytes."""
    kept = [path.read_bytes() for path in target.corpus]

    def changed(seed: int) -> bytes:
        random = Random(seed)
        return mutate(random.choice(kept), kept, random, _MOST_BYTES)

    return st.one_of(st.integers(0, 2**32).map(changed), st.binary(max_size=300))


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_kept_inputs_do_no_harm(name: str) -> None:
    target = load_target(name)
    assert target.corpus, "a target without an input tests nothing"
    for path in target.corpus:
        try:
            run_within_budget(target, path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path.name}: {error!r}") from error


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_changed_inputs_do_no_harm(name: str) -> None:
    target = load_target(name)

    examples = settings().max_examples if _IS_LONG else target.examples

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(inputs(target))
    def hold(data: bytes) -> None:
        run_within_budget(target, data)

    hold()


def test_the_corpus_is_small_and_belongs_to_targets() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGET_NAMES)
    files = [path for folder in CORPUS.iterdir() for path in folder.iterdir()]
    assert len(files) <= _MOST_FILES
    assert max(path.stat().st_size for path in files) < _LARGEST_FILE
