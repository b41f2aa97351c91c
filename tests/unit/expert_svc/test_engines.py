from __future__ import annotations

import subprocess
import sys

import pytest
from ep_kernels.triton.device import DeviceUnavailable, open_device

from mesh.config import ConfigError, load


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_with_what_lacks(name: str) -> None:
    with pytest.raises(DeviceUnavailable, match=r"build for CPUs|no GPU") as refused:
        open_device(name)
    assert refused.value.device == name
    assert refused.value.lacks in str(refused.value)


def test_the_interpreter_is_chosen_before_triton_or_not_at_all() -> None:
    script = (
        "import triton\n"
        "from ep_kernels.triton.device import DeviceUnavailable, open_device\n"
        "try:\n    open_device('interpreter')\n"
        "except DeviceUnavailable as error:\n    print(error.lacks)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "triton was imported before it was chosen"


def test_who_computes_on_the_cpu_loads_no_triton() -> None:
    script = "import sys, expert_svc.service, router_svc.service\nprint('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("role", ["router", "expert"])
@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:1000", "CUDA", ""])
def test_only_devices_are_accepted(role: str, name: str) -> None:
    with pytest.raises(ConfigError, match="expected cpu, cuda, cuda:N or interpreter"):
        load(None, {f"{role}.device": name}, {})


@pytest.mark.parametrize(
    ("role", "key", "value", "why"),
    [
        ("expert", "model.exact", "true", "model.exact"),
        ("router", "model.exact", "true", "model.exact"),
        ("expert", "model.weights", "fp32", "expert.weights"),
        ("expert", "model.weights", "fp16", "expert.weights"),
        ("router", "model.weights", "fp16", "bf16"),
    ],
)
def test_what_a_device_cannot_do_is_refused(role: str, key: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        load(None, {f"{role}.device": "cuda", key: value}, {})
    assert f"{role}.device" in str(refused.value)


def test_only_experts_on_a_device_choose_their_weights() -> None:
    with pytest.raises(ConfigError, match=r"expert\.device other than cpu"):
        load(None, {"expert.weights": "fp8"}, {})
    for weights in ("auto", "bf16", "fp8"):
        load(None, {"expert.device": "cuda", "expert.weights": weights}, {})


def test_a_router_on_a_device_may_have_fp32_weights() -> None:
    load(None, {"router.device": "cuda:3", "model.weights": "fp32"}, {})
    load(None, {"router.device": "cuda", "expert.device": "cuda:1"}, {})
    both = {"router.device": "cuda", "expert.device": "cuda", "model.weights": "fp32"}
    load(None, both | {"expert.weights": "fp8"}, {})
