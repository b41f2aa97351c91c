from pathlib import Path

import msgspec

from compose.processes import STOP_ORDER, compose, endpoints
from mesh.settings import GatewaySettings, MeshSettings, Settings


def specs(settings: Settings, **keywords):
    keywords = {"config": None, "overrides": {}, "python": "py", "parent_pid": 7} | keywords
    return compose(settings, **keywords)


def test_default_mesh_is_one_planner_one_router_two_experts_one_gateway():
    assert sorted(spec.id for spec in specs(Settings())) == [
        "expert-0", "expert-1", "gateway-0", "planner", "router-0",
    ]  # fmt: skip


def test_planner_starts_first_and_stops_last():
    assert specs(Settings())[0].role == "planner"
    assert STOP_ORDER == ("gateway", "router", "expert", "planner")


def test_children_are_started_as_a_service_manager_would():
    argv = next(s.argv for s in specs(Settings(), config=Path("m.toml")) if s.id == "router-0")
    assert argv == (
        "py", "-P", "-m", "router_svc", "--id", "router-0", "--parent-pid", "7",
        "--config", "m.toml",
    )  # fmt: skip


def test_flags_are_passed_on_and_each_gateway_gets_a_port_of_its_own():
    settings = Settings(mesh=MeshSettings(gateways=3), gateway=GatewaySettings(port=9000))
    by_id = {s.id: s.argv for s in specs(settings, overrides={"gateway.port": "9000"})}
    assert "gateway.port=9000" in by_id["gateway-0"]
    assert "gateway.port=9001" in by_id["gateway-1"]
    assert "gateway.port=9002" in by_id["gateway-2"]
    assert "gateway.port=9000" not in by_id["gateway-2"]
    assert "gateway.port=9000" in by_id["planner"]


def test_urls_name_an_address_that_a_client_on_this_host_reaches():
    def urls(host: str) -> list[str]:
        gateway = msgspec.structs.replace(GatewaySettings(), host=host)
        return [e.url for e in endpoints(Settings(gateway=gateway))]

    assert urls("127.0.0.1") == ["http://127.0.0.1:8000"]
    assert urls("0.0.0.0") == ["http://127.0.0.1:8000"]
    assert urls("::") == ["http://[::1]:8000"]
    assert urls("mesh.example") == ["http://mesh.example:8000"]
