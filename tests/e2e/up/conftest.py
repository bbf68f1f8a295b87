"""One cluster for the folder: `baton up` with the demo model, as a person runs it. It goes with the
folder's last test, as its idle processes take time from whatever comes next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.lib.local_cluster import LocalCluster, local_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(
        "--threads", "1", "--prefill-chunk", "128", "--kv-precision", "exact"
    ) as running:
        yield running
