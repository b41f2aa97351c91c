from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mesh import rundir
from mesh.rundir import AlreadyRunning, RunDirError
from mesh.settings import MeshSettings, Settings


def _settings(directory: Path | str) -> Settings:
    return Settings(mesh=MeshSettings(run_dir=str(directory)))


def test_the_directory_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = rundir.create_run_dir(_settings(tmp_path / "a" / "b"))
    finally:
        os.umask(old)
    assert made == tmp_path / "a" / "b"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert rundir.create_run_dir(_settings(made)) == made


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    with pytest.raises(RunDirError, match=r"open to others .*chmod 700"):
        rundir.create_run_dir(_settings(tmp_path / "run"))


@pytest.mark.parametrize("place", ["/proc/none", "/proc/none/deep/er", "file/run"])
def test_a_place_where_none_can_be_made_is_named_with_its_setting(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"\(mesh.run_dir\) cannot be made: .*; expected a path"):
        rundir.create_run_dir(_settings(tmp_path / place))


def test_a_link_or_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(RunDirError):
            rundir.create_run_dir(_settings(tmp_path / name))


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RunDirError, match="belongs to uid"):
        rundir.create_run_dir(_settings(tmp_path / "run"))


def test_a_path_too_long_for_sockets_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="bytes, more than 107"):
        rundir.create_run_dir(_settings(tmp_path / ("d" * 100)))


def test_the_default_lies_in_the_users_runtime_directory(monkeypatch) -> None:
    with tempfile.TemporaryDirectory() as runtime:  # the path of a test's own is too long
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert rundir.run_dir(Settings()) == Path(runtime, "moemesh", "default")
        made = rundir.create_run_dir(Settings())
        assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("value", ["", "relative", "/nonexistent/dir"])
def test_without_a_runtime_directory_it_is_named_after_the_user(value: str, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert rundir.run_dir(Settings()) == Path(f"/tmp/moemesh-{os.getuid()}/default")


def test_a_default_directorys_parent_must_be_private_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "moemesh").mkdir()
    (tmp_path / "moemesh").chmod(0o777)
    with pytest.raises(RunDirError, match="open to others"):
        rundir.create_run_dir(Settings())


def test_state_lies_in_the_users_state_directory_unless_configured(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tmp_path / ".local" / "state" / "moemesh" / "default"
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert rundir.state_dir(Settings()) == at_home
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert rundir.state_dir(Settings()) == at_home
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert rundir.state_dir(Settings()) == Path("/s/moemesh/default")
    assert rundir.state_dir(Settings(mesh=MeshSettings(state_dir="/d"))) == Path("/d")


def test_addresses_lie_in_the_directory_unless_configured(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    assert rundir.planner_address(settings) == f"ipc://{tmp_path}/planner.sock"
    assert rundir.broadcast_address(settings) == f"ipc://{tmp_path}/broadcast.sock"
    assert rundir.router_address(settings, "router-1") == f"ipc://{tmp_path}/router-1.sock"
    assert rundir.lanes_path(settings, "expert-1") == f"{tmp_path}/expert-1.lanes"
    assert rundir.bundles_address(settings, "expert-1") == f"ipc://{tmp_path}/expert-1.bundles"
    other = Settings(mesh=MeshSettings(planner="tcp://127.0.0.1:1", broadcast="ipc:///b"))
    assert rundir.planner_address(other) == "tcp://127.0.0.1:1"
    assert rundir.broadcast_address(other) == "ipc:///b"


def test_the_last_process_of_a_mesh_takes_its_orders_along(tmp_path: Path) -> None:
    settings, orders = _settings(tmp_path), tmp_path / rundir.ORDERS
    orders.write_text("{}")
    with rundir.claim(tmp_path, "router-0"):
        assert rundir.running(tmp_path) == {"router-0": os.getpid()}
        rundir.take_along(settings)
        assert orders.exists()
    (tmp_path / "expert-0.pid").write_text("1\n")  # of one that was killed
    wide = Settings(mesh=MeshSettings(run_dir=str(tmp_path), planner="tcp://10.0.0.1:1"))
    rundir.take_along(wide)
    assert orders.exists()
    rundir.take_along(settings)
    assert not orders.exists()
    rundir.take_along(settings)
    assert rundir.running(tmp_path) == {}


HOLD = """
import sys, pathlib
from mesh.rundir import claim
held = claim(pathlib.Path(sys.argv[1]), "router-0")
print("held", flush=True)
sys.stdin.read()
"""


def test_an_id_is_held_by_one_process_until_it_dies(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunning) as caught:
            rundir.claim(tmp_path, "router-0")
        assert caught.value.pid == other.pid
        with rundir.claim(tmp_path, "router-1"):
            assert (tmp_path / "router-1.pid").read_text() == f"{os.getpid()}\n"
        assert not (tmp_path / "router-1.pid").exists()
    finally:
        other.kill()
        other.communicate()
    with rundir.claim(tmp_path, "router-0"):
        assert (tmp_path / "router-0.pid").read_text() == f"{os.getpid()}\n"


def test_a_place_that_takes_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"gone/router-0\.pid cannot be made: No such file"):
        rundir.claim(tmp_path / "gone", "router-0")
    (tmp_path / "router-0.pid").symlink_to("/dev/full")
    with pytest.raises(RunDirError, match=r"router-0\.pid cannot be written: "):
        rundir.claim(tmp_path, "router-0")
