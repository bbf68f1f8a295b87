import pickle

import msgspec
import pytest

from cluster.settings import WorkerSettings, as_role, without_password
from protocol.errors import StartupError

SETTINGS = WorkerSettings(
    role="prefill",
    cluster="c",
    redis_url="redis://user:hunter2@h:6379/0",
    token="s3cret",
    model_path="/m",
    model_id="m",
)


def test_repr_hides_secrets() -> None:
    for text in (repr(SETTINGS), str(SETTINGS), f"{SETTINGS}"):
        assert "s3cret" not in text
        assert "hunter2" not in text
    assert "role='prefill'" in repr(SETTINGS)


def test_pickle_keeps_everything() -> None:
    assert pickle.loads(pickle.dumps(SETTINGS)) == SETTINGS  # noqa: S301


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"token": ""}, "BATON_TOKEN"),
        ({"port": 70_000}, "port"),
        ({"max_batch": 0}, "max_batch"),
        ({"kv_tokens": -1}, "kv_tokens"),
        ({"step_budget_ms": -1.0}, "step_budget_ms"),
        ({"step_budget_ms": float("nan")}, "step_budget_ms"),
        ({"local_prefill_tokens": -1}, "local_prefill_tokens"),
        ({"role": "both"}, "role"),
    ],
)
def test_check_names_what_is_wrong(change: dict[str, object], named: str) -> None:
    SETTINGS.check()
    with pytest.raises(StartupError, match=named):
        msgspec.structs.replace(SETTINGS, **change).check()


def test_roles() -> None:
    assert (as_role("prefill"), as_role("decode")) == ("prefill", "decode")
    with pytest.raises(StartupError, match="'prefil'"):
        as_role("prefil")


def test_url_without_password() -> None:
    assert without_password("redis://h:1/0") == "redis://h:1/0"
    assert "pw" not in without_password("rediss://:pw@h:1/0")
    assert without_password("http://[broken") == "(not a URL)"
