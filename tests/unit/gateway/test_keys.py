import hashlib

import pytest

from gateway.keys import Keyring, KeysError, parse_keys, read_keys

KEY = "mm-0123456789abcdef"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def write(tmp_path, text):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return str(path)


def test_a_key_finds_its_tenant_and_limits(tmp_path):
    text = f'[[key]]\nname = "team-a"\nsha256 = "{DIGEST.upper()}"\nmax_concurrent = 3\nweight = 2'
    ring = Keyring(read_keys(write(tmp_path, text)))
    tenant = ring.find(KEY.encode())
    assert tenant.name == "team-a"
    assert (tenant.limits.max_concurrent, tenant.limits.weight) == (3, 2.0)
    for wrong in (b"", b"x", KEY[:-1].encode(), DIGEST.encode(), KEY.encode() + b" ", b"\xff"):
        assert ring.find(wrong) is None


def test_keys_come_from_the_environment_too():
    ring = Keyring(parse_keys(f"team-b={KEY}, another-key-of-20-chars", "KEYS"))
    assert ring.find(KEY.encode()).name == "team-b"
    assert ring.find(b"another-key-of-20-chars").name == "key-2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = 1", "Expected `array`"),
        ("", "missing required field `key`"),
        ("key = []", r"no \[\[key\]\]"),
        ("[[key]\n", "is not TOML"),
        (f'[[key]]\nname = "a"\nsha256 = "{KEY}"', r"number 1: sha256: expected 64"),
        (f'[[key]]\nname = "a b"\nsha256 = "{DIGEST}"', "name: expected"),
        (f'[[key]]\nname = "a"\nkey = "{KEY}"\nsha256 = ""', "unknown field `key`"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nweight = 0', "weight: expected"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nweight = nan', "weight: expected"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nmax_concurrent = -1', "max_concurrent"),
        (f'[[key]]\nname = "a"\nsha256 = {KEY}', "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_no_secret_shown(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(KeysError, match=message) as caught:
        read_keys(path)
    assert str(caught.value).startswith(path)
    assert KEY not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(KeysError, match=r"none\.toml cannot be read: No such file"):
        read_keys(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("text", ["short", f"{KEY},", f"a b={KEY}", f"x={KEY}é", "team="])
def test_a_variable_that_cannot_be_used_is_named_and_no_secret_shown(text):
    with pytest.raises(KeysError, match="KEYS: entry") as caught:
        parse_keys(text, "KEYS")
    assert KEY not in str(caught.value)


def test_names_and_keys_are_there_once():
    with pytest.raises(KeysError, match="named 'a'"):
        Keyring(parse_keys(f"a={KEY},a={KEY}2", "KEYS"))
    with pytest.raises(KeysError, match="same key"):
        Keyring(parse_keys(f"a={KEY},b={KEY}", "KEYS"))
