from __future__ import annotations

import pickle
import subprocess
import sys

from router.settings import RouterSettings


def test_the_router_runs_without_torch() -> None:
    code = (
        "import sys, router.http.app\n"
        "bad = {'torch', 'transformers', 'ray', 'engine'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_travel_to_another_process(settings: RouterSettings) -> None:
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301
