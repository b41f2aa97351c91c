import socket

import pytest

from compose.cli import main


@pytest.fixture
def moemesh(monkeypatch, capsys, tmp_path):
    """Runs the command in this process; returns exit code, standard output and error."""
    monkeypatch.setenv("MOEMESH_MESH_RUN_DIR", str(tmp_path / "run"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["moemesh", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_version_names_the_protocol(moemesh):
    code, out, _ = moemesh("version")
    assert code == 0
    assert "protocol 1-1" in out


def test_config_shows_a_flag_as_the_origin(moemesh, tmp_path):
    code, out, _ = moemesh("config", "--set", "gateway.port=9")
    assert code == 0
    assert "port = 9" in out
    assert "# flag --set gateway.port" in out
    assert f'run_dir = "{tmp_path / "run"}"' in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "router.max_runing=1"), ("router.max_runing", "did you mean")),
        (("--set", "router.max_running=-1"), ("router.max_running = -1", "more than 0")),
        (("--set", "nonsense"), ("--set nonsense", "section.key=value")),
        (("--port", "99999"), ("gateway.port", "99999", "flag --port")),
        (("--experts", "0"), ("mesh.experts", "flag --experts")),
        (("--model", "/nowhere"), ("model.path", "/nowhere")),
        (("--config", "/nowhere.toml"), ("/nowhere.toml", "cannot be read")),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected_and_starts_nothing(
    moemesh, tmp_path, arguments, words
):
    code, _, err = moemesh("up", *arguments)
    assert code == 2
    for word in words:
        assert word in err
    assert not (tmp_path / "run").exists()


def test_a_taken_port_is_said_before_anything_starts(moemesh, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = moemesh("up", "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "--port" in err
    assert not (tmp_path / "run").exists()


def test_without_a_mesh_down_and_status_say_so(moemesh):
    code, _, err = moemesh("down")
    assert code == 1
    assert "no mesh was started" in err
    code, _, err = moemesh("status", "--timeout", "0.1")
    assert code == 1
    assert "no planner answers" in err


def test_reference_refuses_parameters_out_of_range(moemesh):
    code, _, err = moemesh("reference", "--prompt", "x", "--temperature", "-1")
    assert code == 2
    assert "--temperature" in err
