from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from compose import app
from compose.keys import check_keys
from compose.options import UsageError
from compose.processes import Recipe
from mesh.settings import MeshSettings, SecuritySettings, Settings

EVERYBODY = [
    "planner", "planner", "gateway-0", "gateway", "router-0", "router", "expert-0", "expert",
    "expert-1", "expert", "admin", "admin",
]  # fmt: skip


def keygen(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(app.run(["keygen", *arguments]))
    return int(end.value.code or 0)


def test_keygen_writes_a_private_file_a_process_and_one_public_list(tmp_path, capsys) -> None:
    out = tmp_path / "keys"
    assert keygen(["--out", str(out), *EVERYBODY]) == 0
    shown = capsys.readouterr().out
    listed = tomllib.loads((out / "allow.toml").read_text())
    assert {name: entry["role"] for name, entry in listed.items()} == dict(
        zip(EVERYBODY[::2], EVERYBODY[1::2], strict=True)
    )
    for name, entry in listed.items():
        path = out / f"{name}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = tomllib.loads(path.read_text())
        assert key["public"] == entry["public"]
        assert key["secret"] not in shown + (out / "allow.toml").read_text()


def test_keygen_adds_and_replaces(tmp_path, capsys) -> None:
    out = str(tmp_path)
    assert keygen(["--out", out, "router-0", "router"]) == 0
    first = (tmp_path / "router-0.key").read_text()
    assert keygen(["--out", out, "router-1", "router", "router-0", "router"]) == 1
    assert "has a key of router-0 already; --replace" in capsys.readouterr().err
    assert (tmp_path / "router-0.key").read_text() == first
    assert keygen(["--out", out, "--replace", "router-0", "router"]) == 0
    assert (tmp_path / "router-0.key").read_text() != first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected NAME ROLE"),
        (["router-0"], "expected NAME ROLE"),
        (["../x", "router"], "name '../x': expected 1 to 40 letters"),
        (["router-0", "king"], "role 'king' of router-0: expected one of gateway, router"),
        (["a", "router", "a", "expert"], "name 'a' is given twice"),
    ],
)
def test_keygen_says_what_it_expects(tmp_path, capsys, arguments, words) -> None:
    assert keygen(["--out", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_mesh_on_tcp_is_checked_for_its_keys_before_it_starts(tmp_path) -> None:
    def check(address: str) -> None:
        settings = Settings(
            mesh=MeshSettings(planner=address),
            security=SecuritySettings(curve_dir=str(tmp_path)),
        )
        recipe = Recipe(settings, config=None, overrides={}, python="python", parent_pid=1)
        check_keys(settings, recipe.specs())

    keygen(["--out", str(tmp_path), *EVERYBODY])
    check("tcp://127.0.0.1:7000")
    Path(tmp_path, "expert-1.key").unlink()
    with pytest.raises(UsageError, match=r"expert-1.key cannot be read"):
        check("tcp://127.0.0.1:7000")
    check("")
