from pathlib import Path

import msgspec

from compose.processes import STOP_ORDER, Recipe, endpoints, member_index
from mesh.settings import ExpertSettings, GatewaySettings, MeshSettings, Settings


def recipe(settings: Settings, **keywords):
    keywords = {"config": None, "overrides": {}, "python": "py", "parent_pid": 7} | keywords
    return Recipe(settings, **keywords)


def specs(settings: Settings, **keywords):
    return recipe(settings, **keywords).specs()


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


def test_a_gateway_that_stands_in_has_the_port_and_the_socket_of_another():
    settings = Settings(mesh=MeshSettings(gateways=2), gateway=GatewaySettings(port=9000))
    spare = recipe(settings).spec("gateway", 2, shares=1, listen_fd=5)
    assert (spare.id, spare.inherits) == ("gateway-2", (5,))
    assert "gateway.port=9001" in spare.argv
    assert spare.argv[spare.argv.index("--listen-fd") + 1] == "5"


def test_a_planner_started_after_a_change_of_scale_waits_for_as_many_workers():
    changed = recipe(Settings())
    changed.counts["expert"] = 5
    assert "mesh.experts=5" in changed.spec("planner", 0).argv
    assert member_index(changed.spec("expert", 12).id) == 12


def cpus_of(spec):
    return spec.argv[spec.argv.index("--cpus") + 1] if "--cpus" in spec.argv else ""


def test_workers_divide_the_cpus_and_nobody_else_gets_any():
    made = specs(Settings(), cpus={0, 1, 2, 5})
    assert {spec.id: cpus for spec in made if (cpus := cpus_of(spec))} == {
        "expert-0": "0-1", "expert-1": "2,5",
    }  # fmt: skip
    assert not any(map(cpus_of, specs(Settings(), cpus={3})))


def test_workers_that_are_told_where_to_compute_or_compute_elsewhere_divide_nothing():
    for chosen in ({"cpus": "any"}, {"cpus": "0"}, {"device": "cuda"}, {"threads": 2}):
        settings = Settings(expert=ExpertSettings(**chosen))
        assert not any(map(cpus_of, specs(settings, cpus={0, 1})))


def test_a_worker_that_comes_later_has_its_part_among_as_many_as_there_are_to_be():
    changed = recipe(Settings(), cpus=range(6))
    assert cpus_of(changed.spec("expert", 2, among=3)) == "4-5"
    assert cpus_of(changed.spec("expert", 2)) == "0-2"  # it stands in for another
    changed.counts["expert"] = 3
    assert cpus_of(changed.spec("expert", 1)) == "2-3"


def test_urls_name_an_address_that_a_client_on_this_host_reaches():
    def urls(host: str) -> list[str]:
        gateway = msgspec.structs.replace(GatewaySettings(), host=host)
        return [e.url for e in endpoints(Settings(gateway=gateway))]

    assert urls("127.0.0.1") == ["http://127.0.0.1:8000"]
    assert urls("0.0.0.0") == ["http://127.0.0.1:8000"]
    assert urls("::") == ["http://[::1]:8000"]
    assert urls("mesh.example") == ["http://mesh.example:8000"]
