"""The Dockerfile and the compose file, carried out without a container engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROVE = Path(__file__).parents[2] / "compose" / "docker" / "prove.py"


@pytest.mark.soak
@pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces and mounts: needs root")
@pytest.mark.skipif(shutil.which("debootstrap") is None, reason="no debootstrap")
def test_images_are_small_and_serve_as_the_compose_file_says() -> None:
    done = subprocess.run(
        [sys.executable, str(PROVE)], stdout=subprocess.PIPE, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0
    figures = json.loads(done.stdout)
    assert figures["tokens"] == 8
    assert figures["megabytes"]["gateway"] < 200
    assert figures["megabytes"]["planner"] < 200
    assert figures["dev_shm_files"] == 0
    assert figures["left_in_run_dir"] == []
    assert figures["tokens_of_two_hosts"] == 8
    assert figures["lanes_of_two_hosts"] == ["expert-a-0", "expert-b-0"]
