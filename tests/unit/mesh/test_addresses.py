from __future__ import annotations

import pytest

from mesh.addresses import address_fault, leaves_host


@pytest.mark.parametrize(
    "address",
    ["ipc:///run/x.sock", "tcp://127.0.0.1:5000", "tcp://127.1.2.3:1", "tcp://[::1]:5000",
     "tcp://localhost:5000", "tcp://mesh.example:5000", "tcp://10.1.2.3:5000"],
)  # fmt: skip
def test_well_formed_addresses_are_accepted(address: str) -> None:
    assert address_fault(address) == ""


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("ipc://relative", "absolute"),
        ("ipc:///" + "x" * 107, "108 bytes, expected at most 107"),
        ("tcp://0.0.0.0:5000", "wildcard"),
        ("tcp://*:5000", "wildcard"),
        ("tcp://[::]:5000", "wildcard"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:x", "tcp://HOST:PORT"),
        ("tcp://[::1:5", "tcp://HOST:PORT"),
        ("udp://127.0.0.1:1", "expected ipc"),
        ("inproc://x", "expected ipc"),
    ],
)
def test_other_addresses_are_refused(address: str, fault: str) -> None:
    assert fault in address_fault(address)


@pytest.mark.parametrize(
    ("address", "leaves"),
    [
        ("ipc:///run/x.sock", False),
        ("tcp://127.0.0.1:5000", False),
        ("tcp://127.8.8.8:*", False),
        ("tcp://[::1]:5000", False),
        ("tcp://localhost:1", False),
        ("tcp://0.0.0.0:5000", True),
        ("tcp://*:5000", True),
        ("tcp://[::]:5000", True),
        ("tcp://localhost.example:5000", True),
        ("tcp://10.0.0.1:5000", True),
        ("tcp://eth0:5000", True),
    ],
)
def test_what_passes_a_network_is_known(address: str, leaves: bool) -> None:
    assert leaves_host(address) is leaves
