"""The gateway answers as its own OpenAPI document says that it does."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

SCHEMATHESIS = str(Path(sys.executable).with_name("schemathesis"))
# 504 is the answer to a time-out that is too short; what a schema cannot say (two fields that
# exclude each other) is refused all the same.
CHECKS = """
[checks]
positive_data_acceptance.enabled = false
not_a_server_error.expected-statuses = ["2xx", "4xx", 504]
"""


def test_every_answer_is_one_that_is_described(mesh, tmp_path):
    config = tmp_path / "schemathesis.toml"
    config.write_text(CHECKS)
    # /admin asks the planner, which is scripted here.
    command = [SCHEMATHESIS, "--config-file", str(config), "run", f"{mesh.url}/openapi.json"]
    command += ["--exclude-path-regex", "^/admin", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", "10", "--generation-deterministic", "--workers", "1"]
    command += ["--suppress-health-check", "all", "--no-color", "--max-time", "10"]
    # It leaves a cache where it runs.
    done = subprocess.run(
        command, check=False, capture_output=True, timeout=120, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_all_endpoints_are_described(mesh):
    with urllib.request.urlopen(f"{mesh.url}/openapi.json", timeout=15) as response:
        paths = json.load(response)["paths"]
    assert {"/v1/completions", "/v1/models/{id}", "/metrics", "/admin/plan"} <= set(paths)
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["description"] or path.startswith("/admin"), (method, path)
