import shlex

import pytest

from compose.app import run
from compose.processes import Endpoint, endpoints
from compose.sample_request import curl_line
from gateway.keys import Keyring, read_keys
from mesh.settings import GatewaySettings, Settings


def exit_code(*arguments):
    try:
        return run(arguments)
    except SystemExit as end:
        return end.code


def test_the_printed_lines_let_the_printed_key_in(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    found = []
    for name in ("team-a", "team-b"):
        assert exit_code("apikey", name) == 0
        printed = capsys.readouterr()
        (key,) = [word for word in printed.err.split() if word.startswith("mm-")]
        assert key not in printed.out
        found.append(key)
        with path.open("a") as file:
            file.write(printed.out)
    ring = Keyring(read_keys(str(path)))
    assert [ring.find(key.encode()).name for key in found] == ["team-a", "team-b"]
    assert all(len(key) >= 40 for key in found)


def test_a_name_that_no_file_takes_is_refused(capsys):
    assert exit_code("apikey", 'a"b') == 2
    assert "expected 1 to 64 letters" in capsys.readouterr().err


def test_up_refuses_to_let_everyone_in(capsys, monkeypatch):
    monkeypatch.delenv("MOEMESH_API_KEYS", raising=False)
    assert exit_code("up", "--set", "gateway.host=0.0.0.0") == 2
    assert "gateway.api_keys_file or MOEMESH_API_KEYS" in capsys.readouterr().err


def test_with_a_certificate_clients_speak_https():
    gateway = GatewaySettings(tls_cert="c", tls_key="k")
    (endpoint,) = endpoints(Settings(gateway=gateway))
    assert endpoint.url == "https://127.0.0.1:8000"


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_sample_request_says_what_it_needs(needs_key):
    line = curl_line(Endpoint("127.0.0.1", 80, tls=True), "m", needs_key=needs_key)
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:2] == ["curl", "-sk"]
    assert ("Authorization: Bearer $KEY" in words) == needs_key
