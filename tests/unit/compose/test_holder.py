import os
import subprocess
import sys

import pytest

from compose.holder import claim_mesh, launcher_pid, release_mesh
from mesh.rundir import AlreadyRunning
from mesh.settings import MeshSettings, Settings


@pytest.fixture
def settings(tmp_path):
    return Settings(mesh=MeshSettings(run_dir=str(tmp_path / "run")))


def test_a_claimed_mesh_is_refused_to_another_launcher_and_names_its_holder(settings):
    directory, held = claim_mesh(settings)
    assert launcher_pid(directory) == os.getpid()
    with pytest.raises(AlreadyRunning) as refusal:
        claim_mesh(settings)
    assert refusal.value.pid == os.getpid()
    release_mesh(directory, held, settings, keep_logs=False)
    assert not directory.exists()


def test_a_mesh_can_be_claimed_again_after_its_release(settings):
    for _ in range(2):
        directory, held = claim_mesh(settings)
        release_mesh(directory, held, settings, keep_logs=False)
    assert launcher_pid(directory) is None


def test_what_a_killed_launcher_left_is_cleared(settings):
    code = (
        "import sys, os, signal\n"
        "from compose.holder import claim_mesh\n"
        "from mesh.settings import MeshSettings, Settings\n"
        "d, held = claim_mesh(Settings(mesh=MeshSettings(run_dir=sys.argv[1])))\n"
        "(d / 'planner.sock').touch(); (d / 'logs').mkdir(); (d / 'logs' / 'x.log').touch()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, settings.mesh.run_dir], check=False)
    assert done.returncode == -9
    directory, held = claim_mesh(settings)
    assert [p.name for p in directory.iterdir()] == ["launcher.pid"]
    release_mesh(directory, held, settings, keep_logs=False)
    assert not directory.exists()


def test_logs_that_are_kept_stay_until_the_next_start(settings):
    directory, held = claim_mesh(settings)
    (directory / "logs").mkdir()
    (directory / "logs" / "x.log").write_text("why")
    (directory / "planner.sock").touch()
    release_mesh(directory, held, settings, keep_logs=True)
    assert [p.name for p in directory.iterdir()] == ["logs"]
    assert (directory / "logs" / "x.log").read_text() == "why"
    assert launcher_pid(directory) is None
    directory, held = claim_mesh(settings)
    assert not (directory / "logs").exists()
    release_mesh(directory, held, settings, keep_logs=False)


def test_nobody_holds_a_directory_that_is_not_there(tmp_path):
    assert launcher_pid(tmp_path / "none") is None
