"""What is wanted, for checks that are given facts."""

from cluster.doctor.finding import Finding
from cluster.doctor.subject import Pool, Wanted
from engine.ipc.spec import EngineSpec

SPEC = EngineSpec(model_path="", role="decode", device="cpu", threads=1)
POOLS = (Pool("prefill", 1, SPEC), Pool("decode", 1, SPEC))
WANTED = Wanted(ports=(8000,), pools=POOLS)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]
