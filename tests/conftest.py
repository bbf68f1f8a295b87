"""What every test runs under."""

from __future__ import annotations

import os

# Before torch is imported anywhere: its threads spin at barriers, and on a shared machine a second
# one makes small models slower by an order of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")
