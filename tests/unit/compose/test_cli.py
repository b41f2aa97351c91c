import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from compose.cli import main

DEMO = Path(__file__).parents[3] / "demo" / "model"


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
        (("--experts", "1000"), ("mesh.experts = 1000 (flag --experts)", "expected at most")),
        (
            ("--set", "expert.slots_per_layer=3"),
            ("expert.slots_per_layer = 3 (flag --set", "2 expert workers with 3 slots each have 6"),
        ),
        (("--set", "router.matrix_threads=-1"), ("router.matrix_threads = -1", "0 to 256")),
        (("--routers", "1000"), ("mesh.routers", "expert.max_lanes = 64")),
        (("--gateways", "1000"), ("mesh.gateways", "1 to 64")),
        (("--port", "65535", "--gateways", "2"), ("gateway.port", "expected at most 65534")),
        (("--config", "/nowhere.toml"), ("/nowhere.toml", "cannot be read")),
        (("--tp", "2", "--set", "router.tp=4"), ("--tp 2 and --set router.tp=4", "expected one")),
        (("--port", "0", "--set", "gateway.port=9"), ("--port 0 and --set gateway.port=9",)),
        (
            ("--set", "router.kv_cache_bytes=1000000"),
            ("(flag --set router.kv_cache_bytes): expected 0 or at least 1638400", "64 blocks of"),
        ),
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


def test_a_flag_that_says_what_set_says_is_no_conflict(moemesh):
    code, _, err = moemesh("up", "--experts", "1000", "--set", "mesh.experts=1000")
    assert code == 2
    assert "expected at most" in err


def test_reference_refuses_parameters_out_of_range(moemesh):
    code, _, err = moemesh("reference", "--prompt", "x", "--temperature", "-1")
    assert code == 2
    assert "--temperature" in err


def test_a_worker_for_each_redundant_slot_is_not_too_many(moemesh):
    code, _, err = moemesh("up", "--experts", "1000", "--set", "planner.redundant_slots=900")
    assert code == 2
    assert "+ planner.redundant_slots = 900" in err
    assert "at most 932" in err


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", None, "config.json: cannot be read: Is a directory"),
        ("config.json", (b'"vocab_size": ', b'"vocab_size": 1'), "has shape"),
        ("model.safetensors", (b"experts.3.up_proj", b"experts.3.no_proj"), "experts.3.up_proj"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: not a JSON object"),
        ("chat_template.jinja", "{% if %}", "chat template, line 1"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_starts_nothing(moemesh, tmp_path, file, change, words):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    broken = model / file
    if change is None:
        broken.unlink()
        broken.mkdir()
    elif isinstance(change, tuple):
        assert change[0] in broken.read_bytes()
        broken.write_bytes(broken.read_bytes().replace(*change, 1))
    else:
        broken.write_text(change)
    code, _, err = moemesh("up", "--model", str(model))
    assert code == 2
    assert "model.path" in err
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [("--bogus", "unknown option --bogus\n"), ("--router=2", "did you mean --routers?")],
)
def test_only_a_close_option_is_suggested(moemesh, option, words):
    code, _, err = moemesh("up", option)
    assert code == 2
    assert words in err


def test_an_interrupt_while_modules_are_imported_ends_at_once_and_quietly(tmp_path):
    line = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "cyclopts.py").write_text(line)
    command = [sys.executable, "-c", "from compose.cli import main; main()", "up"]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],  # as `&` in a script does
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr == b""
