"""`python -m cluster.monitoring DIR`: what Prometheus needs to watch a cluster on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.monitoring.files import Rules, write_prometheus
from cluster.monitoring.prometheus import Watched

if __name__ == "__main__":
    for path in write_prometheus(Path(sys.argv[1]), Watched(("http://127.0.0.1:8000",)), Rules()):
        print(path)
