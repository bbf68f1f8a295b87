"""`baton keys new` prints a line that routers take, with the scopes that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.credentials.init import KEY_SCOPES
from router.common.errors import ApiError
from router.tenants.key_store import KeyStore
from router.tenants.tenant import SCOPES


@pytest.mark.parametrize(
    ("options", "opens"),
    [
        ([], {"generate"}),
        (["--scope", "monitor"], {"monitor"}),
        (["--scope", "monitor", "--scope", "generate"], {"monitor", "generate"}),
        (["--scope", "admin"], set(SCOPES)),
    ],
)
def test_the_line_is_one_of_the_file(tmp_path: Path, options: list[str], opens: set[str]) -> None:
    done = CliRunner().invoke(app, ["keys", "new", "acme", *options])
    assert done.exit_code == 0, done.output
    shown = [line.strip() for line in done.output.splitlines() if line.startswith("  ")]
    key, line = shown
    path = tmp_path / "keys.yaml"
    path.write_text(f"{line}\n")
    assert key not in line
    store = KeyStore(str(path))
    for scope in SCOPES:
        if scope in opens:
            assert store.authenticate(f"Bearer {key}", scope).name == "acme"
        else:
            with pytest.raises(ApiError, match="scope"):
                store.authenticate(f"Bearer {key}", scope)


def test_an_unknown_scope_is_refused() -> None:
    done = CliRunner().invoke(app, ["keys", "new", "acme", "--scope", "root"])
    assert done.exit_code == 2 and "'root' is not a scope" in done.output
    assert "sk-" not in done.output
    assert KEY_SCOPES == SCOPES
