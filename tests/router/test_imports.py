from __future__ import annotations

import pickle
import subprocess
import sys

import ray.cloudpickle

from router.app import create_app
from router.settings import RouterSettings


def test_the_router_runs_without_torch() -> None:
    code = (
        "import sys, router.app\n"
        "bad = {'torch', 'transformers', 'ray', 'engine'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_and_a_maker_of_the_app_travel_to_another_process(
    settings: RouterSettings,
) -> None:
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301
    make = ray.cloudpickle.loads(ray.cloudpickle.dumps(lambda: create_app(settings)))
    assert make().title == "Baton"
