"""What follows from facts; nothing is looked at."""

import msgspec
import pytest

from cluster.doctor import gpus, leftovers, machine, model, packages, ports, redis, report
from cluster.doctor.finding import Finding
from cluster.doctor.gpus import GpuDevice, GpuFacts
from cluster.doctor.leftovers import LeftoverFacts
from cluster.doctor.machine import DiskSpace, MachineFacts
from cluster.doctor.model import ModelFacts
from cluster.doctor.packages import PackageFacts
from cluster.doctor.ports import PortFacts, PortState
from cluster.doctor.redis import RedisFacts
from cluster.models import hub
from engine.execution.build_tools import MissingTool
from tests.cluster.doctor.subjects import POOLS, SPEC, SUBJECT, levels

GIB = 2**30
ROOM = DiskSpace("/tmp", 100 * GIB, 50 * GIB, True)
MACHINE = MachineFacts(
    cpus=4, load=0.1, open_files=(65536, 65536), swap_used=0, shm=ROOM, folders=(ROOM,)
)
CARD = GpuDevice(0, "H200", 139 * GIB, 138 * GIB, "570.1")


def change(facts: MachineFacts, **fields: object) -> MachineFacts:
    return msgspec.structs.replace(facts, **fields)


# ---- packages --------------------------------------------------------------------------------


def test_packages_as_required() -> None:
    facts = PackageFacts("3.11.7", ">=3.11,<3.13", ("rich", "ray[serve]==2.60.0"), {"rich": "15"})
    facts.installed["ray"] = "2.60.0"
    assert levels(packages.judge(facts, SUBJECT)) == ["ok", "ok"]


def test_every_wrong_package_is_named_with_what_was_expected() -> None:
    wanted = ("redis", "torch==2.13.0", "protobuf>=7.35")
    installed = {"redis": None, "torch": "2.12.1+cpu", "protobuf": "7.36"}
    python, found = packages.judge(
        PackageFacts("3.14.0", ">=3.11,<3.13", wanted, installed), SUBJECT
    )
    assert python.level == "problem" and "3.14.0" in python.text
    assert found.text == "redis is missing; torch is 2.12.1+cpu, expected ==2.13.0"
    assert "pip install" in found.remedy


def test_a_local_build_of_a_pinned_version_will_do() -> None:
    facts = PackageFacts("3.12.1", ">=3.11", ("torch==2.13.0",), {"torch": "2.13.0+cpu"})
    assert levels(packages.judge(facts, SUBJECT)) == ["ok", "ok"]


# ---- machine ---------------------------------------------------------------------------------


def test_sufficient_machine_has_no_problem() -> None:
    assert set(levels(machine.judge(MACHINE, SUBJECT))) == {"ok"}


@pytest.mark.parametrize(
    ("fields", "check", "level", "remedy"),
    [
        ({"cpus": 1}, "cpu", "note", "fewer workers"),
        ({"open_files": (1024, 4096)}, "open files", "note", "ulimit -Hn 10240"),
        ({"open_files": (64, 128)}, "open files", "problem", "ulimit -Hn 10240"),
        ({"swap_used": 3 * GIB}, "swap", "note", "swapoff"),
        ({"shm": None}, "/dev/shm", "note", "--shm-size"),
        ({"shm": DiskSpace("/dev/shm", GIB, 1 << 20, True)}, "/dev/shm", "note", "--shm-size"),
        ({"folders": (DiskSpace("/tmp", GIB, GIB, False),)}, "disk", "problem", "TMPDIR"),
        ({"folders": (DiskSpace("/tmp", GIB, 1 << 20, True),)}, "disk", "problem", "make room"),
        ({"folders": (DiskSpace("/tmp", 100 * GIB, GIB, True),)}, "disk", "note", "TMPDIR"),
    ],
)
def test_scarce_resources_are_named(
    fields: dict[str, object], check: str, level: str, remedy: str
) -> None:
    bad = [f for f in machine.judge(change(MACHINE, **fields), SUBJECT) if f.level != "ok"]
    assert [(f.check, f.level) for f in bad] == [(check, level)]
    assert remedy in bad[0].remedy


def test_soft_limit_of_open_files_does_not_matter() -> None:
    """Every process raises it to the hard one."""
    found = machine.judge(change(MACHINE, open_files=(64, 1048576)), SUBJECT)
    assert set(levels(found)) == {"ok"}


def test_threads_that_would_fit_the_cpus() -> None:
    eight = msgspec.structs.replace(SPEC, threads=8)
    pools = tuple(msgspec.structs.replace(pool, engine=eight) for pool in POOLS)
    wanted = msgspec.structs.replace(SUBJECT, pools=pools)
    found = next(f for f in machine.judge(MACHINE, wanted) if f.check == "cpu")
    assert found.text == "2 engines with 16 threads on 4 CPUs"
    assert found.remedy == "--threads 2"


# ---- GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "level", "text"),
    [
        (GpuFacts(0), "ok", "none"),
        (GpuFacts(1, (CARD,), "13.0", ""), "problem", "torch is the CPU build"),
        (GpuFacts(1, (CARD,), "12.4", "13.0"), "problem", "the driver serves CUDA 12.4"),
        (GpuFacts(1, (CARD,), "13.1", "13.0"), "ok", "torch with CUDA 13.0"),
        (GpuFacts(1, (CARD,), "12.0", "12.8"), "ok", "torch with CUDA 12.8"),
        (GpuFacts(2, error="nvidia-smi: timed out"), "note", "timed out"),
    ],
)
def test_gpus(facts: GpuFacts, level: str, text: str) -> None:
    wanted = msgspec.structs.replace(
        SUBJECT, pools=tuple(_anywhere(pool.role, pool.workers) for pool in POOLS)
    )
    first = gpus.judge(facts, wanted)[0]
    assert first.level == level and text in first.text


@pytest.mark.parametrize(
    ("facts", "level", "text"),
    [
        (GpuFacts(0), "problem", "device is cuda, but no GPU is visible"),
        (GpuFacts(0, (CARD,), order=""), "problem", "no GPU is visible"),
        (GpuFacts(0, (CARD,)), "note", "none in /proc"),
    ],
)
def test_device_cuda_needs_a_gpu(facts: GpuFacts, level: str, text: str) -> None:
    engine = msgspec.structs.replace(POOLS[0].engine, device="cuda")
    pools = tuple(msgspec.structs.replace(pool, engine=engine) for pool in POOLS)
    (found,) = gpus.judge(facts, msgspec.structs.replace(SUBJECT, pools=pools))
    assert found.level == level and text in found.text


def test_driver_that_is_too_old_is_a_problem_with_three_ways_out() -> None:
    wanted = msgspec.structs.replace(SUBJECT, pools=(_anywhere("decode", 1),))
    [finding, *_] = gpus.judge(GpuFacts(1, (CARD,), "12.4", "13.0"), wanted)
    assert "install a driver for CUDA 13 or newer" in finding.remedy
    assert "`make clean up`" in finding.remedy and "CUDA_VISIBLE_DEVICES=" in finding.remedy


@pytest.mark.parametrize("error", ["", "nvidia-smi is not installed"])
def test_tools_that_triton_lacks_are_problems_where_engines_use_a_gpu(error: str) -> None:
    tools = (MissingTool("no compiler", "get gcc"), MissingTool("no header", "get it"))
    facts = GpuFacts(1, () if error else (CARD,), "13.1", "13.0", error, missing_tools=tools)
    wanted = msgspec.structs.replace(SUBJECT, pools=(_anywhere("decode", 1),))
    found = [f for f in gpus.judge(facts, wanted) if f.level == "problem"]
    assert [(f.check, f.text, f.remedy) for f in found] == [("gpu", *tool) for tool in tools]
    assert "problem" not in levels(gpus.judge(facts, SUBJECT))  # its engines use the CPU
    assert levels(gpus.judge(GpuFacts(0, missing_tools=tools), wanted)) == ["ok"]


@pytest.mark.parametrize(
    ("order", "visible", "device", "expected"),
    [
        (None, 4, None, [0, 1, 2, 3]),
        (None, 4, "cuda:2", [2]),
        ("3,1", 2, None, [3, 1]),
        ("3,1", 2, "cuda:1", [1]),
        ("3,1", 2, "cuda", [3, 1]),
        ("GPU-b0, GPU-d", 2, None, [1, 3]),
        ("MIG-7", 1, None, [0]),  # nvidia-smi's list does not say which GPU that is
        (None, 4, "cuda:4", []),
    ],
)
def test_gpus_of_engines_are_those_that_cuda_shows_them(
    order: str | None, visible: int, device: str | None, expected: list[int]
) -> None:
    cards = tuple(GpuDevice(i, "H", GIB, GIB, "", f"GPU-{c}0") for i, c in enumerate("abcd"))
    facts = GpuFacts(visible, cards, order=order)
    assert [gpu.index for gpu in facts.engine_gpus(device)] == expected


def test_a_gpu_that_is_not_visible_is_a_problem() -> None:
    facts = GpuFacts(1, (CARD,), "13.1", "13.0")
    for device, level in (("cuda:0", "ok"), ("cuda:1", "problem")):
        engine = msgspec.structs.replace(SPEC, device=device)
        pool = msgspec.structs.replace(POOLS[0], engine=engine)
        found = gpus.judge(facts, msgspec.structs.replace(SUBJECT, pools=(pool,)))[0]
        assert found.level == level, found.text


def _anywhere(role: str, workers: int) -> object:
    return msgspec.structs.replace(
        POOLS[0], role=role, workers=workers, engine=msgspec.structs.replace(SPEC, device=None)
    )


def test_gpu_in_use_is_a_note() -> None:
    used = msgspec.structs.replace(CARD, free=20 * GIB)
    assert levels(gpus.judge(GpuFacts(1, (used,), "13.0", "13.0"), SUBJECT)) == ["ok", "note"]


# ---- ports -----------------------------------------------------------------------------------


def test_a_taken_port_is_a_problem_with_its_owner_and_the_next_free_one() -> None:
    port = PortState(8000, "pid 7 (nginx)", next_free=8003)
    (found,) = ports.judge(PortFacts("", (port,)), SUBJECT)
    assert found.level == "problem"
    assert found.text == "8000 is taken by pid 7 (nginx)" and "--port 8003" in found.remedy
    moves = msgspec.structs.replace(SUBJECT, port_moves=True)
    assert levels(ports.judge(PortFacts("", (port,)), moves)) == ["note"]


def test_our_own_cluster_on_the_port_is_no_problem() -> None:
    (found,) = ports.judge(PortFacts("", (PortState(8000, "pid 7", "default", 8001),)), SUBJECT)
    assert found.level == "note" and "baton down`" in found.remedy
    (found,) = ports.judge(PortFacts("", (PortState(8000, "pid 7", "audit", 8001),)), SUBJECT)
    assert "baton down --cluster audit`" in found.remedy


def test_no_free_port_is_a_problem_even_if_it_could_move() -> None:
    moves = msgspec.structs.replace(SUBJECT, port_moves=True)
    (found,) = ports.judge(PortFacts("", (PortState(8000, "pid 7"),)), moves)
    assert found.level == "problem"


# ---- Redis -----------------------------------------------------------------------------------

WHERE = "redis://:...@cache:6379/0"


@pytest.mark.parametrize(
    ("facts", "expected", "text"),
    [
        (RedisFacts(), ["ok"], "embedded"),
        (RedisFacts(WHERE, version="7.2.4", seconds=0.001), ["ok"], "ping 1.0 ms"),
        (RedisFacts(WHERE, version="6.2.14"), ["ok"], "6.2.14"),
        (RedisFacts(WHERE, version="6.0.16"), ["problem"], "expected 6.2 or newer"),
        (RedisFacts(WHERE, version="7.0.0", replica=True), ["problem"], "replica"),
        (RedisFacts(WHERE, version="7.0.0", seconds=0.05), ["ok", "note"], "7.0.0"),
        (RedisFacts(WHERE, "", "7.0.0", 0.0, "allkeys-lru", True), ["ok", "note"], "7.0.0"),
        (RedisFacts(WHERE, "", "7.0.0", 0.0, "allkeys-lru", False), ["ok"], "7.0.0"),
        (RedisFacts(WHERE, "AuthenticationError: no"), ["problem"], "no"),
        (RedisFacts("", "no redis-server"), ["problem"], "embedded"),
    ],
)
def test_redis(facts: RedisFacts, expected: list[str], text: str) -> None:
    found = redis.judge(facts, SUBJECT)
    assert levels(found) == expected and text in found[0].text
    assert all(f.remedy for f in found if f.level != "ok")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("AuthenticationError: invalid password", "password"),
        ("ConnectionError: SSL: CERTIFICATE_VERIFY_FAILED", "ssl_ca_certs"),
        ("ConnectionError: Connection refused", "start it"),
    ],
)
def test_the_remedy_fits_the_error(error: str, remedy: str) -> None:
    assert remedy in redis.judge(RedisFacts(WHERE, error), SUBJECT)[0].remedy


def test_unreachable_redis_is_only_a_note_for_a_router() -> None:
    router = msgspec.structs.replace(SUBJECT, kind="router", pools=())
    refused = RedisFacts(WHERE, "ConnectionError: Connection refused")
    assert levels(redis.judge(refused, router)) == ["note"]
    assert levels(redis.judge(refused, SUBJECT)) == ["problem"]
    wrong = RedisFacts(WHERE, "AuthenticationError: invalid password")
    assert levels(redis.judge(wrong, router)) == ["problem"]


# ---- leftovers and models --------------------------------------------------------------------


def test_leftovers_are_notes_with_the_command_that_removes_them() -> None:
    assert levels(leftovers.judge(LeftoverFacts(None, 0, ()), SUBJECT)) == ["ok"]
    found = leftovers.judge(LeftoverFacts(None, 3, ("/tmp/baton-abcdefgh",)), SUBJECT)
    assert levels(found) == ["note", "note"]
    assert "baton down --cluster default" in found[0].remedy
    assert found[1].text == "1 folder of an ended run: /tmp/baton-abcdefgh"
    assert found[1].remedy == "rm -r /tmp/baton-abcdefgh"


def test_a_model_to_download_must_fit_the_disk() -> None:
    listing = hub.HubListing(5, 10 * GIB)
    fits = ModelFacts(id="a/b", to_fetch=listing, disk_free=11 * GIB)
    assert levels(model.judge(fits, SUBJECT)) == ["note"]
    full = ModelFacts(id="a/b", to_fetch=listing, disk_free=9 * GIB)
    (found,) = model.judge(full, SUBJECT)
    assert found.level == "problem" and "9.0 GiB free" in found.text


def test_all_problems_of_a_model_are_reported() -> None:
    assert levels(model.judge(ModelFacts(problems=("a", "b")), SUBJECT)) == ["problem", "problem"]
    named = msgspec.structs.replace(SUBJECT, model="nobody/x")
    (found,) = model.judge(ModelFacts(id="nobody/x", problems=("is not on the hub",)), named)
    assert found.remedy.startswith("--model takes a folder or a hub id")


def test_summary_counts_problems_and_notes() -> None:
    fine, odd, bad = (Finding("x", level, "") for level in ("ok", "note", "problem"))
    assert report.summary([fine], 1.0) == "no problems  (1.0 s)"
    assert report.summary([fine, odd], 1.0) == "no problems, 1 note  (1.0 s)"
    assert report.summary([odd, bad, bad, odd], 1.0) == "2 problems, 2 notes  (1.0 s)"
