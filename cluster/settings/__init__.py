"""Settings that workers, the autoscaler and the supervisor get at their start.

``cluster.config.assemble`` makes them from the configuration; Ray or a file carries them to the
process. Keys have no defaults here: ``cluster.config.schema`` declares each key once.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

# It is here because `baton --help` must not import what the modules of settings need.
AutoscalerMode: TypeAlias = Literal["off", "advise", "act"]
