"""A mesh whose sockets are all TCP, those of the control plane with CURVE keys."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.support.meshes import MOEMESH, Mesh, free_port

NAMES = ("planner", "router-0", "expert-0", "expert-1", "gateway-0", "admin")


def test_a_mesh_serves_over_tcp_with_keys_and_answers_nobody_without(
    tmp_path: Path, tiny_deepseek: Path
) -> None:
    keys = tmp_path / "keys"
    pairs = [part for name in NAMES for part in (name, name.partition("-")[0])]
    subprocess.run([MOEMESH, "keygen", "--out", str(keys), *pairs], check=True, timeout=60)
    tcp = {
        "mesh__planner": f"tcp://127.0.0.1:{free_port()}",
        "mesh__broadcast": f"tcp://127.0.0.1:{free_port()}",
        "security__curve_dir": str(keys),
        "network__listen": "127.0.0.1",
        "network__data_plane": "tcp",
    }
    with Mesh(tiny_deepseek, **tcp) as mesh:
        status, answer = mesh.post(
            "/v1/completions", {"model": tiny_deepseek.name, "prompt": [1, 2, 3], "max_tokens": 4}
        )
        assert status == 200, answer
        places = [f"{key.replace('__', '.')}={value}" for key, value in tcp.items()]
        with_key = [part for place in places for part in ("--set", place)]
        members = json.loads(mesh.run("status", "--json", *with_key))["members"]
        for member in members:
            if member["role"] == "router":
                assert member["control"].startswith("tcp://127.0.0.1:")
            if member["role"] == "expert":
                assert not member["lanes"]
                # Where lanes are opened, and nothing of what lets a router in.
                for kind in ("lanes_tcp", "bundles"):
                    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", member[kind])
        plain = [MOEMESH, "status", "--json", "--set", f"mesh.run_dir={mesh.run_dir}"]
        for refused in (
            [],
            ["--set", places[2], "--set", f"security.key_file={keys}/router-0.key"],
        ):
            done = subprocess.run(
                [*plain, "--set", places[0], *refused, "--timeout", "1.5"],
                check=False, capture_output=True, timeout=60, text=True,
            )  # fmt: skip
            assert done.returncode == 1, done.stdout
        for name in NAMES:
            secret = (keys / f"{name}.key").read_text().split('secret = "')[1][:40]
            assert secret not in mesh.logs()
