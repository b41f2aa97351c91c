"""Who is let in, through a real gateway: API keys, the admin key, TLS, and what never leaks."""

import asyncio
import base64
import hashlib
import json
import os
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import openai
import pytest

from compose.probes import gateway_readiness
from compose.processes import Endpoint
from gateway.access import guard
from gateway.api.guard import Guard
from gateway.errors import Forbidden
from gateway.keys import Keyring
from gateway.tenants import Tenant
from mesh.settings import GatewaySettings
from mesh.supervise import CannotServe, ExitCode
from tests.support.certificates import CERTIFICATE, tls_files
from tests.support.meshes import MOEMESH
from tests.unit.gateway.scripted_mesh import DEADLINE_S, Mesh, Script, free_port, wait_until

KEY_A = "mm-key-of-tenant-a-0123456789"
KEY_B = "mm-key-of-tenant-b-0123456789"
ADMIN = "mm-key-of-the-administrator-01"
SECRETS = (KEY_A, KEY_B, ADMIN, *(hashlib.sha256(k.encode()).hexdigest() for k in (KEY_A, KEY_B)))
BODY = {"model": "tales", "prompt": [5], "max_tokens": 4}


def key_file(path, *entries):
    lines = []
    for name, key, limits in entries:
        digest = hashlib.sha256(key.encode()).hexdigest()
        lines += ["[[key]]", f'name = "{name}"', f'sha256 = "{digest}"', *limits]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A gateway with two API keys, of which ``b`` may have one sequence at once, and an admin."""
    run_dir = tmp_path_factory.mktemp("gw")
    run_dir.chmod(0o700)
    mesh = Mesh(run_dir)
    try:
        mesh.add_router("router-0")
        mesh.start_gateway(
            environ={"MOEMESH_ADMIN_KEY": f"root={ADMIN}"},
            gateway__api_keys_file=key_file(
                run_dir / "keys.toml", ("a", KEY_A, []), ("b", KEY_B, ["max_concurrent = 1"])
            ),
        )
        mesh.wait_ready()
        yield mesh
    finally:
        mesh.close()


@pytest.fixture
def keyed(guarded):
    guarded.reset()
    return guarded


def ask(mesh, path, headers=None, body=None):
    """(status, headers, error code or None) of a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(mesh.url + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            response.read()
            return response.status, response.headers, None
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())["error"]["code"]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- API keys


def test_a_key_lets_in_and_names_its_tenant_in_the_log(keyed):
    with keyed.client(KEY_A) as client:
        assert client.completions.create(**BODY).usage.completion_tokens == 4
    wait_until(
        lambda: any(line.get("tenant") == "a" for line in keyed.logs()), "the tenant is logged"
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("mm-nobody-has-this-key-0123"),
        {"Authorization": KEY_A},
        {"Authorization": f"Basic {base64.b64encode(f'x:{KEY_A}'.encode()).decode()}"},
        bearer(hashlib.sha256(KEY_A.encode()).hexdigest()),
        bearer(ADMIN),
        bearer(""),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize", "/no/such/path"])
def test_without_a_known_key_nothing_is_answered(keyed, path, headers):
    status, answered, code = ask(keyed, path, headers)
    assert (status, code) == (401, "invalid_api_key")
    assert answered["www-authenticate"] == "Bearer"


def test_the_client_library_says_which_error_it_was(keyed):
    with (
        keyed.client("mm-nobody-has-this-key-0123") as client,
        pytest.raises(openai.AuthenticationError, match="not known") as caught,
    ):
        client.completions.create(**BODY)
    assert "nobody" not in str(caught.value)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_need_no_key(keyed, path):
    assert ask(keyed, path)[0] == 200


def test_a_keys_limit_is_its_own(keyed):
    keyed.answer = lambda _: Script(keyed.story, hold_after=1)
    with (
        keyed.client(KEY_B) as b,
        keyed.client(KEY_A) as a,
        b.completions.create(**BODY, stream=True),
    ):
        with pytest.raises(openai.RateLimitError, match="1 sequences at once") as caught:
            b.completions.create(**BODY)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.BadRequestError, match="may have 1"):
            b.completions.create(**BODY, n=2)
        keyed.answer = keyed.tell_story
        assert a.completions.create(**BODY).choices


def test_priority_does_not_reach_the_routers_where_tenants_mix(keyed, mesh):
    for one, expected in ((keyed, 0), (mesh, 7)):
        with one.client(KEY_A) as client:
            client.completions.create(**BODY, extra_body={"priority": -7})
        assert [submit.priority for submit in one.routers["router-0"].submits] == [expected]


def test_one_tenants_flood_does_not_starve_another(own_mesh):
    """Twelve wait for two places; another key's request is let in and is next but one."""
    router = own_mesh.add_router("router-0")
    own_mesh.start_gateway(
        environ={"MOEMESH_API_KEYS": f"flood={KEY_A},other={KEY_B}"},
        gateway__max_queue=12,
        router__max_running=1,
    )
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, hold_after=1)
    statuses = []

    def send(key, prompt):
        statuses.append(ask(own_mesh, "/v1/completions", bearer(key), BODY | {"prompt": prompt})[0])

    threads = [threading.Thread(target=send, args=(KEY_A, [5, 6])) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: own_mesh.metric("num_requests_waiting") == 10, "ten wait")
    threads.append(threading.Thread(target=send, args=(KEY_B, [7])))
    threads[-1].start()
    wait_until(lambda: own_mesh.metric("num_requests_waiting") == 11, "and the other one")
    own_mesh.call(router.release)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert statuses == [200] * 13
    assert (7,) in [submit.prompt for submit in router.submits[:4]]


# ---------------------------------------------------------------- administrators


def test_admin_needs_its_own_key(keyed):
    assert ask(keyed, "/admin/plan")[::2] == (401, "invalid_api_key")
    assert ask(keyed, "/admin/plan", bearer(KEY_A))[::2] == (403, "forbidden")
    # The scripted planner answers nobody, but the administrator is let through to ask.
    assert ask(keyed, "/admin/no/such/page", bearer(ADMIN))[0] == 404


def test_a_browser_may_send_the_admin_key_as_a_password(keyed):
    status, headers, _ = ask(keyed, "/admin/no/such/page")
    assert status == 401
    assert "Basic" in headers["www-authenticate"]
    sent = base64.b64encode(f"anyone:{ADMIN}".encode()).decode()
    assert ask(keyed, "/admin/no/such/page", {"Authorization": f"Basic {sent}"})[0] == 404
    assert ask(keyed, "/admin/no/such/page", {"Authorization": "Basic ?"})[0] == 401


def test_another_sites_page_cannot_ask_with_the_administrators_browser(keyed):
    path, evil = "/admin/no/such/page", {"Origin": "https://evil.example"}
    assert ask(keyed, path, bearer(ADMIN) | evil, {})[::2] == (403, "forbidden")
    assert ask(keyed, path, bearer(ADMIN) | {"Origin": keyed.url}, {})[0] == 404


def test_on_loopback_admin_is_open_until_there_is_a_key(mesh):
    path = "/admin/no/such/page"
    assert ask(mesh, path)[0] == 404
    assert ask(mesh, path, {"Host": "localhost:1"})[0] == 404
    assert ask(mesh, path, {"Host": "evil.example"})[::2] == (403, "forbidden")
    assert ask(mesh, path, {"Origin": "https://evil.example"}, {})[::2] == (403, "forbidden")


def test_beyond_loopback_admin_says_which_setting_is_missing():
    open_to_all = Guard(keys=Keyring([]), admins=Keyring([]), anonymous=Tenant("x"), loopback=False)
    for path in ("/admin", "/admin/plan"):
        with pytest.raises(Forbidden, match=r"gateway\.admin_key_file or MOEMESH_ADMIN_KEY"):
            open_to_all.check({"path": path, "method": "GET", "headers": [(b"host", b"localhost")]})


# ---------------------------------------------------------------- what is refused at the start


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example"])
def test_beyond_loopback_a_key_is_needed(host):
    settings = GatewaySettings(host=host)
    with pytest.raises(CannotServe, match=r"gateway\.api_keys_file or MOEMESH_API_KEYS"):
        guard(settings, {})
    assert guard(settings, {"MOEMESH_API_KEYS": KEY_A}).anonymous is None
    allowed = GatewaySettings(host=host, allow_anonymous=True)
    assert guard(allowed, {}).one_tenant
    assert guard(GatewaySettings(host="127.0.0.9"), {}).one_tenant


def test_anonymous_clients_beside_keys_are_one_tenant():
    settings = GatewaySettings(allow_anonymous=True)
    door = guard(settings, {"MOEMESH_API_KEYS": f"a={KEY_A}"})
    assert [tenant.name for tenant in door.tenants] == ["a", "anonymous"]
    plain = {"path": "/v1/models", "method": "GET", "headers": []}
    assert door.check(plain).name == "anonymous"
    keyed = plain | {"headers": [(b"authorization", f"bearer  {KEY_A}".encode())]}
    assert door.check(keyed).name == "a"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gateway__host": "0.0.0.0"}, "gateway.allow_anonymous"),
        ({"gateway__admin_key_file": "/no/such"}, "gateway.admin_key_file"),
        ({"gateway__tls_cert": "/no/cert", "gateway__tls_key": "/no/key"}, "gateway.tls_cert"),
    ],
)
def test_a_gateway_that_must_not_serve_says_why(own_mesh, settings, message):
    process = own_mesh.spawn_gateway(free_port(), **settings)
    assert process.wait(DEADLINE_S) == ExitCode.CANNOT_SERVE
    assert message in process.stderr.read()
    process.stderr.close()


# ---------------------------------------------------------------- TLS


def test_https(own_mesh, tmp_path):
    own_mesh.tls = ssl.create_default_context(cadata=CERTIFICATE)
    own_mesh.add_router("router-0")
    own_mesh.start_gateway(**tls_files(tmp_path))
    own_mesh.wait_ready()
    data = json.dumps(BODY | {"stream": True}).encode()
    with urllib.request.urlopen(
        f"{own_mesh.url}/v1/completions", data, timeout=DEADLINE_S, context=own_mesh.tls
    ) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    where = urlsplit(own_mesh.url)
    probe = Endpoint(where.hostname, where.port, tls=True)
    assert asyncio.run(gateway_readiness(probe, DEADLINE_S)) is None
    own_mesh.tls = None
    own_mesh.url = own_mesh.url.replace("https", "http")
    assert own_mesh.status("/health") in {0, 400}


def test_a_key_of_another_certificate_is_refused(own_mesh, tmp_path):
    files = tls_files(tmp_path)
    files["gateway__tls_key"].write_text(CERTIFICATE)
    process = own_mesh.spawn_gateway(free_port(), **files)
    assert process.wait(DEADLINE_S) == ExitCode.CANNOT_SERVE
    assert "its own private key" in process.stderr.read()
    process.stderr.close()


# ---------------------------------------------------------------- secrets


def test_no_secret_is_in_logs_answers_or_the_shown_configuration(keyed):
    answers = []
    for path in ("/v1/models", "/openapi.json", "/metrics", "/tokenizer_info", "/admin/x"):
        for key in (KEY_A, ADMIN, ADMIN + "x"):
            request = urllib.request.Request(keyed.url + path, headers=bearer(key))
            try:
                with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                    answers.append(response.read().decode())
            except urllib.error.HTTPError as error:
                answers.append(error.read().decode())
    shown = subprocess.run(
        [MOEMESH, "config", "--set", f"gateway.api_keys_file={keyed.run_dir}/keys.toml"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"MOEMESH_ADMIN_KEY": ADMIN, "MOEMESH_API_KEYS": KEY_A},
    ).stdout
    assert "MOEMESH_ADMIN_KEY is set (not shown)" in shown
    for text in (*answers, shown, keyed.log_path.read_text()):
        assert not any(secret in text for secret in SECRETS)
