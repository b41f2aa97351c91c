from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mesh.config import ConfigError, knobs, load
from mesh.settings import Settings


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return path


def test_defaults_are_valid_and_say_so() -> None:
    effective = load(None, {}, {})
    assert effective.settings == Settings()
    assert set(effective.origin.values()) == {"default"}
    assert set(effective.origin) == {knob.key for knob in knobs()}


def test_a_flag_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "[router]\nmax_running = 1\nmax_waiting = 1\nthreads = 1\n")
    environ = {"MOEMESH_ROUTER_MAX_RUNNING": "2", "MOEMESH_ROUTER_MAX_WAITING": "2"}
    effective = load(path, {"router.max_running": "3"}, environ)
    router = effective.settings.router
    assert (router.max_running, router.max_waiting, router.threads) == (3, 2, 1)
    assert effective.origin["router.max_running"] == "flag --set router.max_running"
    assert effective.origin["router.max_waiting"] == "environment MOEMESH_ROUTER_MAX_WAITING"
    assert effective.origin["router.threads"] == f"file {path}"
    assert effective.origin["router.block_size"] == "default"


def test_a_flag_of_another_name_is_named() -> None:
    names = {"gateway.port": "--port"}
    assert load(None, {"gateway.port": "9"}, {}, flag_names=names).origin["gateway.port"] == (
        "flag --port"
    )
    with pytest.raises(ConfigError, match=r"gateway\.port = '99999' .*--port|99999.*--port"):
        load(None, {"gateway.port": "99999"}, {}, flag_names=names)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "[mesh]\nname = 'blue'\n")
    assert load(None, {}, {"MOEMESH_CONFIG": str(path)}).settings.mesh.name == "blue"


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.key)
def test_every_default_can_be_given_as_text_and_in_a_file(knob, tmp_path: Path) -> None:
    text = str(knob.default).lower() if isinstance(knob.default, bool) else str(knob.default)
    for effective in (load(None, {knob.key: text}, {}), load(None, {}, {knob.variable: text})):
        assert effective.settings == Settings()
        assert effective.origin[knob.key] != "default"
    section, name = knob.key.split(".")
    value = msgspec.json.encode(knob.default).decode()
    path = _file(tmp_path, f"[{section}]\n{name} = {value}\n")
    assert load(path, {}, {}).settings == Settings()


def test_numbers_are_accepted_where_words_are_choices(tmp_path: Path) -> None:
    path = _file(tmp_path, "[router]\nmicro_batches = 2\n")
    assert load(path, {}, {}).settings.router.micro_batches == "2"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[rooter]\n", r"\[rooter\] .*no such section; did you mean router\?"),
        ("[router]\nmax_runing = 1\n", r"router\.max_runing.*did you mean router\.max_running\?"),
        ("[expert]\ncapacity_tokens = 1\n", r"did you mean router\.capacity_tokens\?"),
        ("router = 3\n", r"router = 3 .*expected a table"),
        ("[router]\nmax_running = '8'\n", r"router\.max_running = '8' .*expected a whole number"),
        ("[router]\nmax_running = true\n", r"router\.max_running = True .*whole number"),
        ("[router]\nprefix_cache = 1\n", r"router\.prefix_cache = 1 .*expected true or false"),
        ("[model]\nweights = 'int8'\n", r"model\.weights = 'int8' .*one of 'auto', 'fp32', 'fp16'"),
        ("[router]\nmax_running = 0\n", r"router\.max_running = 0 .*expected more than 0"),
        ("[gateway]\nport = 70000\n", r"gateway\.port = 70000 .*expected a port"),
        ("[mesh]\nname = '../x'\n", r"mesh\.name = '\.\./x' .*expected 1 to 40 letters"),
        ("[mesh]\nrun_dir = 'here'\n", r"mesh\.run_dir = 'here' .*absolute path"),
        ("[mesh]\nstate_dir = 'here'\n", r"mesh\.state_dir = 'here' .*absolute path"),
        ("[planner]\nmin_gain = 1.5\n", r"planner\.min_gain = 1\.5 .*less than 1"),
        ("[planner]\nwindow_buckets = 0\n", r"planner\.window_buckets = 0 .*1 to 600"),
        ("[router]\nmax_running = 600\n", r"router\.max_running = 600 .*max_step_tokens = 512"),
        ("[mesh]\ngateways = 65\n", r"mesh\.gateways = 65 .*expected 1 to 64"),
        ("[mesh]\nrouters = 65\n", r"mesh\.routers = 65 .*expert\.max_lanes = 64"),
        ("[mesh]\ngateways = 2\n[gateway]\nport = 65535\n", r"port = 65535 .*at most 65534"),
        ("[planner]\nheartbeat_ms = 1000\n", r"suspect_after_ms = 1200 .*2000"),
        ("[planner]\ncold_factor = 1.5\n", r"planner\.cold_factor = 1\.5 .*hot_factor = 2\.0"),
        ("[planner]\ndead_after_ms = 1200\n", r"dead_after_ms = 1200 .*suspect_after_ms = 1200"),
        ("[gateway]\nrequest_timeout_s = inf\n", r"request_timeout_s = inf .*more than 0"),
        ("[gateway]\nrequest_timeout_s = nan\n", r"request_timeout_s = nan .*more than 0"),
        ("[mesh]\nplanner = 'tcp://10.0.0.1:1'\n", r"loopback host, or security\.curve_dir"),
        ("[mesh]\nbroadcast = 'tcp://*:1'\n", r"mesh\.broadcast = 'tcp://\*:1' .*wildcard"),
        ("[network]\nports = '9-7'\n", r"network\.ports = '9-7' .*LOW-HIGH"),
        ("[network]\nports = '7-9'\n", r"network\.ports = '7-9' .*network\.listen as well"),
        ("[network]\nadvertise = 'a'\n", r"network\.advertise = 'a' .*network\.listen as well"),
        ("[network]\nlisten = 'eth0'\n", r"network\.listen = 'eth0' .*allow_insecure"),
        (
            "[network]\nlisten = '*'\n[security]\nallow_insecure = true\n",
            r"network\.listen = '\*' .*network\.advertise",
        ),
        (
            "[network]\ndata_plane = 'udp'\n",
            r"network\.data_plane = 'udp' .*'auto', 'shm', 'tcp', 'gloo', 'nccl', 'symm'",
        ),
        (
            "[mesh]\nplanner = 'tcp://10.0.0.1:1'\n[security]\nallow_insecure = true\n",
            r"mesh\.broadcast = '' .*members on other hosts",
        ),
        (
            "[expert]\ncpus = '3-1'\n",
            r"expert\.cpus = '3-1' .*expected auto, any, or CPUs, such as",
        ),
        ("[expert]\ncpus = ''\n", r"expert\.cpus = '' .*expected auto, any, or CPUs, such as"),
        ("[expert]\ncpus = 3\n", r"expert\.cpus = 3 .*expected a string"),
        (
            "[expert]\ncpus = '0-3,8'\ndevice = 'cuda'\n",
            r"expert\.cpus = '0-3,8' .*expected auto or any, or expert\.device = 'cpu'",
        ),
        ("[security]\ncurve_dir = 'keys'\n", r"security\.curve_dir = 'keys' .*absolute path"),
        ("[mesh\n", r"is not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_key_value_expectation_and_source(
    toml: str, message: str, tmp_path: Path
) -> None:
    path = _file(tmp_path, toml)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, {}, {})
    # The cross-checks may blame a default, whose source is then that.
    assert str(path) in caught.value.source or caught.value.source == "default"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml", {}, {})


def test_an_unknown_variable_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean MOEMESH_ROUTER_THREADS\?") as caught:
        load(None, {}, {"MOEMESH_ROUTER_THREAD": "1"})
    assert caught.value.source == "environment MOEMESH_ROUTER_THREAD"
    load(None, {}, {"MOEMESHX": "1", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("MOEMESH_ROUTER_FOO", None),
        ("MOEMESH_FOO", None),
        ("MOEMESH_ROUTR_THREADS", "MOEMESH_ROUTER_THREADS"),
        ("MOEMESH_EXPERT_CAPACITY_TOKENS", "MOEMESH_ROUTER_CAPACITY_TOKENS"),
    ],
)
def test_only_a_close_setting_is_suggested(variable: str, setting: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, {variable: "1"})
    suggestion = f"; did you mean {setting}?" if setting else ""
    assert caught.value.expected == "no such setting" + suggestion


def test_variables_with_secrets_are_no_settings_and_never_shown() -> None:
    effective = load(None, {}, {"MOEMESH_API_KEYS": "hush", "MOEMESH_ADMIN_KEY": "hush"})
    assert effective.settings == Settings()
    with pytest.raises(ConfigError, match=r"did you mean MOEMESH_API_KEYS\?") as caught:
        load(None, {}, {"MOEMESH_API_KEY": "hush"})
    assert "hush" not in str(caught.value)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert.*expected gateway\.tls_key as well"):
        load(None, {"gateway.tls_cert": "x"}, {})
    with pytest.raises(ConfigError, match=r"gateway\.tls_key.*expected gateway\.tls_cert as well"):
        load(None, {"gateway.tls_key": "x"}, {})


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean expert\.threads\?"):
        load(None, {"expert.thread": "1"}, {})


@pytest.mark.parametrize("text", ["1.5", "many", ""])
def test_text_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a whole number"):
        load(None, {"router.threads": text}, {})


def test_one_address_cannot_serve_commands_and_broadcasts() -> None:
    with pytest.raises(ConfigError, match="another address"):
        load(None, {"mesh.planner": "ipc:///a", "mesh.broadcast": "ipc:///a"}, {})


@pytest.mark.parametrize(
    "security",
    [
        {"security.curve_dir": "/keys"},
        {"security.key_file": "/k", "security.allow_file": "/a"},
        {"security.allow_insecure": "true"},
    ],
)
def test_tcp_leaves_the_machine_with_keys_or_by_explicit_will(security: dict[str, str]) -> None:
    planner = {"mesh.planner": "tcp://mesh.example:7", "mesh.broadcast": "tcp://mesh.example:8"}
    assert load(None, planner | security, {}).settings.mesh.planner == "tcp://mesh.example:7"
    with pytest.raises(ConfigError, match="allow_insecure"):
        load(None, planner | {"security.key_file": "/k"}, {})
