from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lib.engines import engine_config
from cluster.local.redis_server import EmbeddedRedis
from engine.execution.engine import Engine
from engine.scheduling.step_policy import plan_prefill_step
from protocol.requests import Request
from tests.engine.conftest import drain, load_model
from tests.engine.families import save
from tests.workers.fork_server import engines_are_forked


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    with engines_are_forked():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """For workers that several tests have."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


class Oracle:
    """The text that a single engine gives to a request that runs alone."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder)

    def __call__(self, request: Request) -> list[int]:
        engine = Engine(self._model, engine_config(pages=64, max_model_len=1024), plan_prefill_step)
        engine.generate(0, request)
        return drain(engine)[0]


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
