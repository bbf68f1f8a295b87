"""Fails when Ray changes a private part that ``ray_internals`` uses; starts no Ray."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import ray
from ray import _raylet as ray_raylet
from ray import serve
from ray._private import node, parameter, ray_constants, services, state
from ray._private import worker as ray_worker
from ray.autoscaler._private import monitor
from ray.core.generated import common_pb2
from ray.experimental import internal_kv
from ray.serve import schema
from ray.serve._private import client, controller, replica
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaState

from cluster.serve import ray_internals, ray_runtime
from cluster.serve.replica_kinds import ALL_KINDS, DeadReplica, application_name, deployment_name


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


class FakeController:
    """Has the two methods of Serve's controller that Baton calls, and records the calls."""

    def __init__(self) -> None:
        deployment: dict[str, Any] = {
            "target_num_replicas": 3,
            "deployment_config": {"ray_actor_options": {"num_cpus": 0}},
        }
        applications = {
            application_name(kind): {"deployments": {deployment_name(kind): deployment}}
            for kind in ALL_KINDS
        }
        self.calls: list[tuple[Any, int]] = []
        self.applications = applications
        self.get_serve_instance_details = SimpleNamespace(
            remote=lambda: {"applications": applications}
        )
        self.update_deployment_replicas = SimpleNamespace(
            remote=lambda *call: self.calls.append(call)
        )


@pytest.fixture
def fake_controller(monkeypatch: pytest.MonkeyPatch) -> FakeController:
    found = FakeController()
    monkeypatch.setattr(
        serve.context, "_get_global_client", lambda: SimpleNamespace(_controller=found)
    )
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return found


def test_ray_has_the_version_that_was_checked() -> None:
    assert ray.__version__ == ray_internals.CHECKED_RAY_VERSION


def test_ray_init_takes_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert '"_temp_dir"' in inspect.getsource(ray_worker.init)
    monkeypatch.setattr(ray, "init", lambda **options: options)
    found = ray_internals.init_ray(tmp_path, address="local")
    assert found == {"address": "local", "_temp_dir": str(tmp_path)}


def test_ray_init_starts_no_process_that_baton_does_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "ray._private.parameter.RayParams(" in inspect.getsource(ray_worker.init)
    head = inspect.getsource(node.Node.start_head_processes)
    assert "if not self._ray_params.no_monitor:" in head and "self.start_api_server(" in head
    every = inspect.getsource(node.Node.start_ray_processes)
    assert "if self._ray_params.include_log_monitor:" in every
    assert "ray._private.services.get_node(" in inspect.getsource(node.Node.__init__)
    start_api_server: Any = node.Node.start_api_server
    get_node: Any = services.get_node

    def init(**_: Any) -> Any:
        replaced: Any = node.Node.start_api_server
        assert replaced is not start_api_server
        replaced(object(), include_dashboard=False, raise_on_failure=False)
        assert services.get_node is not get_node
        return parameter.RayParams(num_cpus=1)

    before: Any = parameter.RayParams
    monkeypatch.setattr(ray, "init", init)
    made = ray_internals.init_ray(tmp_path)
    assert (made.no_monitor, made.include_log_monitor) == (True, False)
    assert (made.dashboard_agent_listen_port, made.num_cpus) == (0, 1)
    assert parameter.RayParams is before
    assert node.Node.start_api_server is start_api_server
    assert services.get_node is get_node


def test_ray_is_asked_for_its_node_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, str]] = [{}, {}, {"node": "alive"}]
    client = SimpleNamespace(get_all_node_info=lambda timeout: answers.pop(0))
    raylet: Any = ray_raylet
    assert callable(raylet.InnerGcsClient.get_all_node_info)  # GcsClient passes calls to it
    monkeypatch.setattr(raylet, "GcsClient", lambda address: client)
    module: Any = services
    monkeypatch.setattr(ray, "init", lambda **_: module.get_node("127.0.0.1:1", "id"))
    monkeypatch.setattr(services, "get_node", lambda address, which: (address, which, len(answers)))
    assert ray_internals.init_ray(Path()) == ("127.0.0.1:1", "id", 0)


def test_the_raylet_starts_and_loads_processes_in_advance() -> None:
    program = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    assert b"RAY_worker_maximum_startup_concurrency" in program
    assert b"RAY_preload_python_modules" in program
    assert find_spec(ray_runtime.PRELOADED_MODULE) is not None


def test_a_deployment_takes_a_version() -> None:
    assert {"version", "_internal"} <= set(parameters(serve.Deployment.options))
    made = ray_internals.versioned_deployment(serve.deployment(name="x")(FakeController), "abc")
    assert (made.name, made.version) == ("x", "abc")


def test_an_application_is_deleted_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(serve.delete) == ["name", "_blocking"]
    calls = []
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: calls.append((name, _blocking)))
    ray_internals.delete_application("router")
    assert calls == [("baton-router", False)]


def test_running_replicas_are_counted_by_state() -> None:
    states = get_type_hints(schema.DeploymentStatusOverview)["replica_states"]
    assert get_args(states) == (ReplicaState, int)
    counts = {ReplicaState.RUNNING: 2, ReplicaState.STARTING: 1}
    assert ray_internals.running_count(counts) == 2
    assert ray_internals.running_count({}) == 0


def test_the_client_has_the_controller() -> None:
    assert callable(serve.context._get_global_client)
    assert "self._controller: Any = controller" in inspect.getsource(client.ServeControllerClient)


def test_the_controller_tells_details_of_applications(fake_controller: FakeController) -> None:
    details = controller.ServeController.get_serve_instance_details
    assert all(
        parameter.default is not inspect.Parameter.empty
        for name, parameter in inspect.signature(details).parameters.items()
        if name != "self"
    )
    assert "applications" in schema.ServeInstanceDetails.model_fields
    assert "deployments" in schema.ApplicationDetails.model_fields
    fields = schema.DeploymentDetails.model_fields
    assert {"target_num_replicas", "deployment_config"} <= fields.keys()
    assert "graceful_shutdown_timeout_s" in schema.DeploymentSchema.model_fields
    assert ray_internals.target_replicas(1.0) == dict.fromkeys(ALL_KINDS, 3)


def test_the_controller_sets_replica_counts(fake_controller: FakeController) -> None:
    update = controller.ServeController.update_deployment_replicas
    assert parameters(update) == ["self", "deployment_id", "target_num_replicas"]
    ray_internals.set_target_replicas("decode", 4, 1.0)
    assert fake_controller.calls == [(DeploymentID("DecodeWorker", "baton-decode"), 4)]


def test_gpus_of_a_worker_are_in_the_options_of_its_deployment(
    fake_controller: FakeController,
) -> None:
    assert "ray_actor_options" in schema.DeploymentSchema.model_fields
    assert "num_gpus" in schema.RayActorOptionsSchema.model_fields
    assert ray_internals.worker_gpus(1.0) == 0.0
    for kind, gpus in (("decode", 0.5), ("autoscaler", 2.0)):
        options = {"deployment_config": {"ray_actor_options": {"num_gpus": gpus}}}
        fake_controller.applications[f"baton-{kind}"] = {"deployments": {"Worker": options}}
    assert ray_internals.worker_gpus(1.0) == 0.5


def test_the_status_of_ray_s_autoscaler_tells_whether_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = ray_constants.DEBUG_AUTOSCALING_STATUS
    assert "DEBUG_AUTOSCALING_STATUS" in inspect.getsource(monitor)
    assert "_internal_kv_put" in inspect.getsource(monitor)
    stored: dict[str, bytes] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_get", stored.get)
    assert not ray_internals.has_node_autoscaler()
    stored[key] = b"{}"
    assert ray_internals.has_node_autoscaler()


def test_replicas_that_died_by_themselves_are_told_from_those_that_serve_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: Any = common_pb2  # its stubs lack them
    died = messages.ActorDiedErrorContext
    causes = {
        "crashed": messages.ActorDeathCause(actor_died_error_context=died(reason=died.WORKER_DIED)),
        "ended": messages.ActorDeathCause(actor_died_error_context=died(reason=died.RAY_KILL)),
        "memory": messages.ActorDeathCause(oom_context=messages.OomContext()),
    }
    actors: dict[str, dict[str, Any]] = {}
    for number, (unique, cause) in enumerate(causes.items()):
        for app in ("baton-decode", "another"):
            name = ReplicaID(unique, DeploymentID("DecodeWorker", app)).to_full_id_str()
            fields = {"ActorID": unique, "Name": name, "DeathCause": cause, "Pid": number}
            actors[f"{app} {unique}"] = fields
    actors["controller"] = {**actors["baton-decode crashed"], "Name": "SERVE_CONTROLLER_ACTOR"}
    assert parameters(state.actors) == ["actor_id", "job_id", "actor_state_name"]
    listed = inspect.getsource(state.GlobalState)
    assert all(f'"{field}"' in listed for field in actors["controller"])
    monkeypatch.setattr(state, "actors", lambda actor_state_name: actors)
    assert ray_internals.dead_replicas() == [
        DeadReplica("crashed", "decode", 0, out_of_memory=False),
        DeadReplica("memory", "decode", 2, out_of_memory=True),
    ]


def test_a_replica_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica)
    addresses = []

    def add_port(_server: object, address: str) -> int:
        addresses.append(address)
        return 1234

    monkeypatch.setattr(replica, "add_port_to_grpc_server", add_port)
    ray_internals.keep_replica_on_loopback()
    ray_internals.keep_replica_on_loopback()  # the second call must not wrap the first
    module: Any = replica
    assert module.add_port_to_grpc_server(None, "[::]:0") == 1234
    assert addresses == ["127.0.0.1:0"]
