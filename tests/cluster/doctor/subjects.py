"""Subjects for checks that are given facts."""

from bench.lib.settings import engine_settings
from cluster.doctor.finding import Finding
from cluster.doctor.subject import DoctorSubject, SubjectPool

SPEC = engine_settings("", device="cpu", threads=1)
POOLS = (SubjectPool("prefill", 1, SPEC), SubjectPool("decode", 1, SPEC))
SUBJECT = DoctorSubject(ports=(8000,), pools=POOLS, connections=8192)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]
