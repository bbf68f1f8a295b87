import pickle

import msgspec
import pytest

from bench.lib.settings import worker_settings
from cluster.settings.connection import without_password
from protocol.errors import StartupError
from protocol.roles import parse_role

SETTINGS = worker_settings(
    "prefill",
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
    ],
)
def test_check_names_what_is_wrong(change: dict[str, object], named: str) -> None:
    SETTINGS.check()
    with pytest.raises(StartupError, match=named):
        msgspec.structs.replace(SETTINGS, **change).check()


def test_roles() -> None:
    assert (parse_role("prefill"), parse_role("decode")) == ("prefill", "decode")
    with pytest.raises(StartupError, match="'prefil'"):
        parse_role("prefil")


def test_url_without_password() -> None:
    assert without_password("redis://h:1/0") == "redis://h:1/0"
    assert "pw" not in without_password("rediss://:pw@h:1/0")
    assert without_password("http://[broken") == "(not a URL)"
    assert without_password("redis://u:pw@h:1/0") == "redis://u:...@h:1/0"
    assert without_password("unix:///run/redis.sock?db=1") == "unix:///run/redis.sock"
    for careless in (
        *(
            "redis://h:1/0?password=pw",
            "redis://:12/pw@h:1/0",
            "redis://u:12?pw@h",
            "redis://:#pw@h",
        ),
        *("redis://:1/x/pw@h:1/0", "pw", ":pw@h:1", "redis://u:pw%40pw@h:1"),
    ):
        assert "pw" not in without_password(careless), careless


@pytest.mark.parametrize(
    "url", ["pw", "http://:pw@h:1", "redis://:pw/pw@h:1/0", "redis://:x@h:1?nonsense=pw", ""]
)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, redis_url=url)
    with pytest.raises(StartupError, match="Redis URL") as raised:
        settings.check()
    assert "pw" not in str(raised.value) and raised.value.__suppress_context__
