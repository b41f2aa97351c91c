"""A certificate for tests of https."""

from __future__ import annotations

from pathlib import Path

# For localhost, good for a hundred years, trusted by nobody but these tests.
PRIVATE_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgBQFHWPy0RPeOrCkI
EbA94MI0JSZvhXR/DMRGEZy6ukihRANCAAQ73dGOl5ZJzribvgLQvNVmKnBMXOja
SEa5Pa0uCoMIqzoZtEtdMC6hIPjIeTJUIw2uNEXZ8OziABYHT6YyjRpQ
-----END PRIVATE KEY-----
"""
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUAiYTHZpwHumv4SjTAvzMI2koh+MwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEzMDEwMDU1M1oYDzIxMjYxMTA2
MTAwNTUzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQ73dGOl5ZJzribvgLQvNVmKnBMXOjaSEa5Pa0uCoMIqzoZtEtdMC6h
IPjIeTJUIw2uNEXZ8OziABYHT6YyjRpQo28wbTAdBgNVHQ4EFgQU5t3a/wHYZgbV
EqIDF641/1AqRc8wHwYDVR0jBBgwFoAU5t3a/wHYZgbVEqIDF641/1AqRc8wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhALAX30EzxX5+enIW8G54md/gcrnIexl4L2NDHsc8pVO/AiBB
qGqyqE5qb5mJ+/0KggJZWXUniy15xv7WfzYI1IvJiw==
-----END CERTIFICATE-----
"""


def tls_files(path: Path) -> dict[str, Path]:
    """Settings of a gateway that serves https by files in the directory ``path``."""
    cert, key = path / "cert.pem", path / "key.pem"
    cert.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    return {"gateway__tls_cert": cert, "gateway__tls_key": key}
