import tomllib
from pathlib import Path

import msgspec

import compose
from compose.commands.config import as_toml
from compose.settings_file import reference
from mesh.config import knobs, load
from mesh.settings import Settings

EXAMPLE = Path(compose.__file__).parent / "moemesh.toml"


def test_the_example_says_of_every_knob_what_the_settings_do():
    # Made by: moemesh config --reference > compose/moemesh.toml
    assert EXAMPLE.read_text() == reference()


def test_the_example_names_every_knob_at_its_default():
    assert load(EXAMPLE, {}, {}).settings == Settings()
    tables = tomllib.loads(EXAMPLE.read_text())
    named = {f"{section}.{key}" for section, table in tables.items() for key in table}
    assert named == {knob.key for knob in knobs()}


def test_printed_configuration_gives_the_same_settings_again(tmp_path):
    effective = load(None, {"model.path": 'a "b"\\c', "gateway.port": "9"}, {})
    printed = as_toml(effective)
    assert msgspec.convert(tomllib.loads(printed), Settings) == effective.settings


def test_printed_configuration_says_where_each_value_came_from(tmp_path):
    file = tmp_path / "m.toml"
    file.write_text("[router]\nmax_running = 8\n")
    environ = {"MOEMESH_GATEWAY_HOST": "::1"}
    printed = as_toml(
        load(file, {"gateway.port": "9"}, environ, flag_names={"gateway.port": "--port"})
    )
    origin = {
        line.split(" = ")[0]: line.split("# ")[-1] for line in printed.splitlines() if "=" in line
    }
    assert origin["max_running"] == f"file {file}"
    assert origin["port"] == "flag --port"
    assert origin["max_queue"] == "default"
    assert "environment MOEMESH_GATEWAY_HOST" in printed
