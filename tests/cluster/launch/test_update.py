from msgspec.structs import replace

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.launch.update import fixed_differences
from protocol.security.tls import HttpTls


def test_only_what_a_running_cluster_cannot_change_is_named() -> None:
    before = assemble.launch_settings(Config())
    assert fixed_differences(before, replace(before, prefill=3, model_id="other")) == []
    assert fixed_differences(before, replace(before, port=before.port + 1)) == ["router.port"]
    https = replace(before.router, http_tls=HttpTls(cert="c", key="k"))
    changed = fixed_differences(before, replace(before, router=https))
    assert changed == ["BATON_HTTP_TLS_CERT", "BATON_HTTP_TLS_KEY"]
