from __future__ import annotations

import typing
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85 as zmq_z85

from mesh.authority import SENDERS, forbidden
from mesh.curve import (
    CurveError,
    Identity,
    KeyExists,
    KeyPair,
    Keyring,
    answer_zap,
    open_keyring,
    write_keys,
    z85,
)
from mesh.links import new_key_pair
from mesh.messages import (
    FetchBundle,
    GetStatus,
    Hello,
    LoadReport,
    Ping,
    SetMode,
    ToBundles,
    ToPlanner,
    ToRouter,
    Unknown,
)
from mesh.settings import SecuritySettings


def pair(name: str, role: str) -> KeyPair:
    return KeyPair(name, role, *new_key_pair())  # type: ignore[arg-type]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys", [pair("planner", "planner"), pair("expert-0", "expert")])
    return tmp_path / "keys"


def ring(keys: Path, id_: str = "planner", role: str = "planner") -> Keyring:
    opened = open_keyring(SecuritySettings(curve_dir=str(keys)), id_, role)  # type: ignore[arg-type]
    assert opened is not None
    return opened


def test_keys_are_private_and_read_back(keys: Path) -> None:
    assert (keys / "planner.key").stat().st_mode & 0o777 == 0o600
    assert keys.stat().st_mode & 0o777 == 0o700
    opened = ring(keys)
    assert (opened.own.name, opened.own.role) == ("planner", "planner")
    assert opened.server_key("planner") == opened.own.public
    expert = ring(keys, "expert-0", "expert").own
    assert opened.identity(expert.public) == Identity("expert-0", "expert")
    assert opened.server_key("expert-0") == opened.server_key("expert") == expert.public


def test_secrets_show_nowhere(keys: Path) -> None:
    opened = ring(keys)
    assert opened.own.secret not in repr(opened)
    assert opened.own.secret not in (keys / "allow.toml").read_text()


def test_without_settings_there_is_no_keyring() -> None:
    assert open_keyring(SecuritySettings(), "planner", "planner") is None


def test_keys_may_lie_apart(keys: Path) -> None:
    security = SecuritySettings(
        key_file=str(keys / "planner.key"), allow_file=str(keys / "allow.toml")
    )
    assert open_keyring(security, "planner", "planner") is not None
    with pytest.raises(CurveError, match=r"security\.allow_file, or security\.curve_dir"):
        open_keyring(SecuritySettings(key_file="/k"), "planner", "planner")


def test_a_name_keeps_its_key_unless_it_is_to_be_replaced(keys: Path) -> None:
    before = ring(keys)
    fresh = pair("planner", "planner")
    with pytest.raises(KeyExists, match="planner already"):
        write_keys(keys, [pair("router-0", "router"), fresh])
    assert not (keys / "router-0.key").exists()
    write_keys(keys, [fresh], replace=True)
    assert ring(keys).own == fresh
    assert before.identity(before.own.public) is None
    assert before.named("expert-0") == Identity("expert-0", "expert")


def test_a_changed_list_is_taken_at_once_and_a_broken_one_is_not(keys: Path) -> None:
    opened = ring(keys)
    late = pair("router-7", "router")
    assert opened.identity(late.public) is None
    write_keys(keys, [late])
    assert opened.identity(late.public) == Identity("router-7", "router")
    allow = keys / "allow.toml"
    allow.write_text(allow.read_text() + "[broken")
    with structlog.testing.capture_logs() as logs:
        assert opened.named("router-7") is not None
        assert opened.named("router-7") is not None
    assert [line["event"] for line in logs] == ["curve.allow_list_unusable"]


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("planner.key", lambda p: p.unlink(), "cannot be read: No such file .*moemesh keygen"),
        ("planner.key", lambda p: p.chmod(0o640), "open to others .mode 640.: chmod 600"),
        ("planner.key", lambda p: p.write_text("= "), "is not TOML"),
        ("planner.key", lambda p: p.write_bytes(b"\xff"), "is not TOML"),
        ("planner.key", lambda p: p.write_text("name = 'planner'\n"), "missing required"),
        ("planner.key", lambda p: p.write_text(p.read_text().replace('= "planner"', '= "x"')),
         "Invalid enum value 'x'"),
        ("planner.key", lambda p: p.write_text(p.read_text()[:-8] + '"\n'), "secret is no key"),
        ("allow.toml", lambda p: p.unlink(), "allow.toml cannot be read"),
        ("allow.toml", lambda p: p.chmod(0o666), "chmod go-w"),
        ("allow.toml", lambda p: p.write_text("[planner]\nrole = 'king'\npublic = ''\n"), "role"),
        ("allow.toml", lambda p: p.write_text("[a]\nrole = 'router'\npublic = 'x'\n"), "a.public"),
        ("allow.toml", lambda p: p.write_text(""), "does not list the key of .*planner"),
        ("allow.toml", lambda p: p.write_text(p.read_text().replace('= "planner"', '= "admin"')),
         "does not list the key"),
    ],
)  # fmt: skip
def test_unsafe_or_wrong_files_are_refused_by_name(
    keys: Path, file: str, change: typing.Callable[[Path], object], fault: str
) -> None:
    secret = (keys / "planner.key").read_text().split('secret = "')[1][:40]
    change(keys / file)
    with pytest.raises(CurveError, match=fault) as caught:
        ring(keys)
    assert file in str(caught.value)
    assert secret not in str(caught.value)


def test_a_key_is_for_its_own_process(keys: Path) -> None:
    (keys / "expert-1.key").write_text((keys / "expert-0.key").read_text())
    (keys / "expert-1.key").chmod(0o600)
    with pytest.raises(CurveError, match="is the key of expert expert-0, expected expert expert-1"):
        ring(keys, "expert-1", "expert")


def test_two_names_cannot_share_a_key(keys: Path) -> None:
    allow = keys / "allow.toml"
    listed = allow.read_text()
    section = listed.split("\n\n")[1]
    allow.write_text(f"{listed}\n[twin-{section[1:]}\n")
    with pytest.raises(CurveError, match="have the same key"):
        ring(keys)


def test_a_server_is_found_by_name_or_by_a_role_of_its_own(keys: Path) -> None:
    write_keys(keys, [pair("expert-1", "expert")])
    opened = ring(keys)
    assert opened.server_key("expert-1") != opened.server_key("expert-0")
    for unknown in ("expert", "router-0"):
        with pytest.raises(CurveError, match=f"no key of '{unknown}'"):
            opened.server_key(unknown)


@given(st.binary(min_size=32, max_size=32))
def test_text_form_of_keys_is_zeromqs(raw: bytes) -> None:
    assert z85(raw) == zmq_z85.encode(raw).decode()


def test_zap_lets_listed_keys_in_by_name_and_nobody_else(keys: Path) -> None:
    opened = ring(keys)
    raw = zmq_z85.decode(opened.own.public)
    head = [b"1.0", b"17", b"mesh", b"10.0.0.9", b""]
    verdict = answer_zap([*head, b"CURVE", raw], opened)
    assert verdict == ([b"1.0", b"17", b"200", b"OK", b"planner", b""], "", "10.0.0.9")
    for rest in ([b"CURVE", bytes(32)], [b"NULL"], [b"PLAIN", b"u", b"p"], [b"CURVE", b"x"], []):
        verdict = answer_zap([*head, *rest], opened)
        assert verdict.frames[2] == b"400"
        assert verdict.reason
    assert answer_zap([], opened).frames[2] == b"400"


def test_every_message_has_its_senders() -> None:
    messages = {
        message
        for union in (ToPlanner, ToRouter, ToBundles)
        for message in typing.get_args(union) or (union,)
    }
    assert messages == set(SENDERS)


@pytest.mark.parametrize(
    ("name", "role", "message", "fault"),
    [
        ("router-0", "router", "hello router-0 router", ""),
        ("router-0", "router", "hello router-0 expert", "role router, not expert"),
        ("router-0", "router", "hello router-1 router", "not that of router-1"),
        ("boss", "admin", "hello boss router", "may not send Hello"),
        ("expert-0", "expert", SetMode(mode="off"), "may not send SetMode"),
        ("boss", "admin", SetMode(mode="off"), ""),
        ("gateway-0", "gateway", SetMode(mode="off"), ""),
        ("expert-0", "expert", GetStatus(), ""),
        ("expert-0", "expert", Ping(gateway="expert-0", incarnation=1), "may not send Ping"),
        ("gateway-0", "gateway", Ping(gateway="gateway-1", incarnation=1), "not that of gateway-1"),
        ("expert-0", "expert", LoadReport(id="expert-0", incarnation=1, counts=()), "LoadReport"),
        ("router-0", "router", FetchBundle(layer=0, slot=0, expert=0, offset=0, size=1), "Fetch"),
        ("planner", "planner", Unknown(), "may not send Unknown"),
    ],
)
def test_a_key_may_do_what_its_role_needs(
    name: str, role: typing.Any, message: object, fault: str
) -> None:
    if isinstance(message, str):
        _, id_, claimed = message.split()
        message = Hello(
            id=id_,
            role=claimed,
            incarnation=1,
            pid=1,
            host="h",
            model_digest="",  # type: ignore[arg-type]
        )
    found = forbidden(Identity(name, role), message)
    assert fault in found if fault else found == ""
