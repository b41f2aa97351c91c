"""Where a process listens and what others are told of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh import hosts, rundir
from mesh.addresses import ports_of
from mesh.hosts import HostError
from mesh.links import LinkError, Net, ServerLink
from mesh.messages import FromPlanner, ToPlanner
from mesh.settings import MeshSettings, NetworkSettings, Settings


def settings(**network: str) -> Settings:
    return Settings(network=NetworkSettings(**network), mesh=MeshSettings(run_dir="/r"))


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("", ""),
        ("127.0.0.1", "127.0.0.1"),
        ("lo", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("*", "0.0.0.0"),
        ("::1", "::1"),
    ],
)
def test_addresses_interfaces_and_names_become_numbers(listen: str, host: str) -> None:
    assert hosts.listen_host(settings(listen=listen)) == host


def test_what_is_neither_is_named() -> None:
    with pytest.raises(HostError, match=r"network\.listen = 'no\.such\.host\.invalid'"):
        hosts.listen_host(settings(listen="no.such.host.invalid"))


def test_routers_and_bundles_listen_on_the_network_where_it_is_configured() -> None:
    here = settings()
    assert rundir.router_address(here, "router-0") == "ipc:///r/router-0.sock"
    beyond = settings(listen="127.0.0.1", ports="7100-7109")
    assert rundir.router_address(beyond, "router-0") == "tcp://127.0.0.1:7100-7109"
    assert rundir.bundles_address(beyond, "expert-0") == "tcp://127.0.0.1:7100-7109"
    assert rundir.bundles_address(settings(listen="127.0.0.1"), "expert-0") == "tcp://127.0.0.1:0"


def test_the_planner_listens_at_its_interface_on_the_port_that_members_know() -> None:
    known = "tcp://planner.example:7000"
    assert hosts.planner_listen(settings(), known) == known
    assert hosts.planner_listen(settings(listen="lo"), known) == "tcp://127.0.0.1:7000"
    assert hosts.planner_listen(settings(listen="lo"), "ipc:///p") == "ipc:///p"


def test_others_are_told_the_advertised_host() -> None:
    bound = "tcp://0.0.0.0:7103"
    behind = settings(listen="*", advertise="node7.example")
    assert hosts.advertised(behind, bound) == "tcp://node7.example:7103"
    assert hosts.advertised(settings(listen="127.0.0.1"), bound) == bound
    assert hosts.advertised(behind, "ipc:///r/x") == "ipc:///r/x"


def test_processes_of_one_kernel_are_on_one_host_unless_told_otherwise() -> None:
    assert hosts.host_id(settings()) == hosts.host_id(settings()) != ""
    assert hosts.host_id(settings()) == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert hosts.host_id(settings(host_id="a")) == "a"


@pytest.mark.parametrize(
    ("text", "ports"), [("", [0]), ("7", [7]), ("7-9", [7, 8, 9]), ("7-7", [7])]
)
def test_ports_are_a_range(text: str, ports: list[int]) -> None:
    assert list(ports_of(text)) == ports


@pytest.mark.parametrize("text", ["-", "9-7", "7-", "-7", "x", "0-5", "7-70000", "7-8-9"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the setting that holds it is named by its reader
        ports_of(text)


def test_links_share_a_range_of_ports_until_it_is_used_up() -> None:
    async def main() -> None:
        net = Net()
        first = ServerLink[ToPlanner, FromPlanner](net, "tcp://127.0.0.1:0", receives=ToPlanner)
        port = int(first.address.rpartition(":")[2])
        address = f"tcp://127.0.0.1:{port}-{port}"
        with pytest.raises(LinkError, match="none of these ports is free"):
            ServerLink[ToPlanner, FromPlanner](net, address, receives=ToPlanner)
        first.close()
        net.close()
        net = Net()
        again = ServerLink[ToPlanner, FromPlanner](net, address, receives=ToPlanner)
        assert again.address == f"tcp://127.0.0.1:{port}"
        again.close()
        net.close()

    asyncio.run(main())
