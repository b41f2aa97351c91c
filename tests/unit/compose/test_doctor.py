"""What the doctor makes of machines, this one included."""

from __future__ import annotations

import json

import msgspec
import pytest

from compose.doctor import Finding, findings
from compose.machine import Gpu, Machine, Torch, look
from mesh.settings import (
    DataPlane,
    ExpertSettings,
    GatewaySettings,
    MeshSettings,
    NetworkSettings,
    RouterSettings,
    Settings,
)

H200 = Gpu(name="H200", memory_bytes=141 << 30, capability="9.0")
CPU = Machine(
    python="3.11.9",
    system="Linux 6.1 x86_64",
    cores=8,
    memory_bytes=64 << 30,
    memory_limit_bytes=0,
    shm_bytes=64 << 20,
    open_files=65536,
    locked_memory=8 << 20,
    planes=("shm", "tcp", "gloo", "nccl", "symm"),
    torch=Torch(version="2.13.0", cpu="AVX2", gloo=True, fp16_kernel=True),
)
GPU = msgspec.structs.replace(
    CPU,
    driver="580.95.05",
    compiler="/usr/bin/cc",
    shm_bytes=2 << 30,
    locked_memory=-1,
    packages={"triton": "3.6.0", "nvidia-nccl-cu13": "2.28"},
    torch=Torch(
        version="2.11.0", cuda="13.0", cpu="AVX512", gloo=True, fp16_kernel=True, nccl="2.28.9",
        gpus=(H200, H200), peers=((False, True), (True, False)),
    ),
)  # fmt: skip


def diagnosed(machine: Machine, settings: Settings | None = None) -> dict[str, Finding]:
    return {one.about: one for one in findings(machine, settings or Settings())}


def without(machine: Machine, **changes: object) -> Machine:
    return msgspec.structs.replace(machine, **changes)


def torch_with(machine: Machine, **changes: object) -> Machine:
    assert machine.torch is not None
    return without(machine, torch=msgspec.structs.replace(machine.torch, **changes))


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_good_machine_has_no_fault(machine: Machine) -> None:
    assert not [one for one in findings(machine, Settings()) if one.verdict == "fault"]


def test_a_machine_without_gpus_serves_through_shared_memory_and_tcp() -> None:
    found = diagnosed(CPU)
    assert found["lanes in shared memory"].verdict == "ok"
    assert found["lanes over TCP"].verdict == "ok"
    assert found["lanes over gloo"].verdict == "ok"
    assert found["lanes over NCCL"].found == "none: no GPU"
    assert found["lanes in symmetric memory"].found == "none: Triton is not installed"


@pytest.mark.parametrize(
    ("machine", "plane", "about", "words"),
    [
        (CPU, "nccl", "lanes over NCCL", "network.data_plane = auto"),
        (GPU, "nccl", "lanes over NCCL", "router.device = cuda and expert.device = cuda"),
        (torch_with(GPU, nccl=""), "nccl", "lanes over NCCL", "moemesh[gpu-cu13]"),
        (torch_with(CPU, gloo=False), "gloo", "lanes over gloo", "moemesh[cpu]"),
        (CPU, "symm", "lanes in symmetric memory", "pip install triton"),
        (GPU, "symm", "lanes in symmetric memory", "router.device = cuda and expert.device = cuda"),
    ],
)
def test_a_plane_that_is_chosen_and_cannot_work_is_a_fault(
    machine: Machine, plane: DataPlane, about: str, words: str
) -> None:
    found = diagnosed(machine, Settings(network=NetworkSettings(data_plane=plane)))[about]
    assert found.verdict == "fault"
    assert words in found.advice
    assert diagnosed(machine)[about].verdict == "note"


@pytest.mark.parametrize("plane", ["nccl", "symm"])
def test_planes_of_devices_want_both_roles_on_the_same_kind(plane: DataPlane) -> None:
    about = {"nccl": "lanes over NCCL", "symm": "lanes in symmetric memory"}[plane]

    def found(machine: Machine, router: str, expert: str) -> Finding:
        return diagnosed(
            machine,
            Settings(
                network=NetworkSettings(data_plane=plane),
                router=RouterSettings(device=router),
                expert=ExpertSettings(device=expert),
            ),
        )[about]

    assert found(GPU, "cuda:0", "cuda:1").verdict == "ok"
    mixed = found(GPU, "cuda", "cpu")
    assert mixed.verdict == "fault"
    assert "and expert.device = cpu" in mixed.found
    assert "expert.device = interpreter" in found(GPU, "cuda", "interpreter").found
    alone = found(torch_with(GPU, gpus=(H200,), peers=((False,),)), "cuda", "cuda")
    assert ("two processes on one GPU" in alone.found) == (plane == "nccl")


def test_planes_that_this_version_lacks_are_not_spoken_of() -> None:
    assert "lanes over NCCL" not in diagnosed(without(GPU, planes=("shm",)))


def test_gpus_are_told_with_what_they_reach() -> None:
    found = diagnosed(GPU)
    assert "0: H200, 141 GiB, sm_90; 1: H200" in found["GPUs"].found
    assert found["peer access"].verdict == "ok"
    assert found["lanes over NCCL"].found.startswith("none: they join GPUs, and router.device")
    apart = diagnosed(torch_with(GPU, peers=((False, False), (False, False))))
    assert "none between 0-1" in apart["peer access"].found


@pytest.mark.parametrize(
    ("machine", "about", "verdict", "words"),
    [
        (without(CPU, torch=None), "torch", "note", "moemesh[cpu]"),
        (without(GPU, torch=None), "torch", "note", "moemesh[gpu-cu13]"),
        (without(GPU, torch=None, driver="550.1"), "torch", "note", "moemesh[gpu-cu12]"),
        (without(CPU, torch=None, torch_error="no libgomp"), "torch", "fault", "moemesh[cpu]"),
        (torch_with(CPU, fp16_kernel=False), "16-bit weights", "note", ""),
        (without(CPU, driver="580.1"), "driver", "note", "moemesh[gpu-cu13]"),
        (without(GPU, driver="550.54"), "driver", "fault", "newer driver"),
        (torch_with(GPU, gpus=()), "driver", "fault", "CUDA_VISIBLE_DEVICES"),
        (
            without(GPU, packages={"nvidia-nccl-cu12": "2", "nvidia-nccl-cu13": "2"}),
            "NCCL", "fault", "uninstall both",
        ),
        (without(GPU, packages={}), "Triton", "fault", "moemesh[gpu-cu13]"),
        (without(GPU, compiler=""), "Triton", "fault", "gcc"),
        (without(CPU, memfd="EPERM"), "lanes in shared memory", "fault", "seccomp"),
        (without(CPU, libraries_missing=("gate",)), "compiled parts", "fault", "pip install"),
        (without(CPU, open_files=1024), "open files", "fault", "ulimit -Hn 1280"),
        (without(GPU, shm_bytes=64 << 20), "/dev/shm", "note", "shm_size"),
        (without(GPU, locked_memory=65536), "locked memory", "note", "ulimit -l"),
    ],
)  # fmt: skip
def test_what_lacks_is_said_with_its_remedy(
    machine: Machine, about: str, verdict: str, words: str
) -> None:
    found = diagnosed(machine)[about]
    assert found.verdict == verdict
    assert words in found.advice


def test_the_configuration_decides_what_is_enough() -> None:
    many = Settings(mesh=MeshSettings(experts=16), gateway=GatewaySettings(max_connections=10))
    assert diagnosed(CPU, many)["cores"].verdict == "note"
    assert diagnosed(without(CPU, open_files=1024), many)["open files"].verdict == "ok"


def test_this_machine_runs_what_these_tests_run(capsys, monkeypatch) -> None:
    from compose.commands.doctor import doctor

    machine = look()
    assert machine.torch is not None
    assert machine.torch.version.startswith("2.")
    assert set(machine.planes) == {"shm", "tcp", "gloo", "nccl", "symm"}
    assert machine.torch.gloo
    assert not machine.memfd
    assert not machine.libraries_missing
    monkeypatch.setattr("compose.commands.doctor.look", lambda: machine)
    code = doctor(json=True)
    shown = json.loads(capsys.readouterr().out)
    assert code == int(any(one["verdict"] == "fault" for one in shown))
    assert {one["about"] for one in shown} >= {"torch", "driver", "lanes in shared memory"}


@pytest.mark.parametrize(
    ("machine", "device", "lacks"),
    [
        (GPU, "cpu", None),
        (GPU, "cuda", ""),
        (GPU, "cuda:1", ""),
        (GPU, "cuda:2", "torch sees 2 GPUs"),
        (CPU, "cuda", "Triton is not installed"),
        (without(CPU, packages={"triton": "3.7.1"}), "cuda", "torch sees 0 GPUs"),
        (without(CPU, packages={"triton": "3.7.1"}), "interpreter", ""),
    ],
)
def test_the_devices_that_are_configured_must_be_here(
    machine: Machine, device: str, lacks: str | None
) -> None:
    settings = Settings(expert=ExpertSettings(device=device))
    found = diagnosed(machine, settings).get("expert.device")
    if lacks is None:
        assert found is None
    else:
        assert found is not None
        assert found.verdict == ("fault" if lacks else "ok")
        assert lacks in found.found


@pytest.mark.parametrize(
    ("machine", "device", "tp", "lacks"),
    [
        (GPU, "cuda", 2, ""),
        (GPU, "cuda:1", 2, "router.tp = 2 takes as many from this one on"),
        (torch_with(GPU, nccl=""), "cuda", 2, "router.tp = 2 needs NCCL"),
        (without(CPU, packages={"triton": "3.7.1"}), "interpreter", 4, ""),
    ],
)
def test_a_router_of_several_gpus_needs_as_many_and_nccl(
    machine: Machine, device: str, tp: int, lacks: str
) -> None:
    settings = Settings(router=RouterSettings(device=device, tp=tp))
    found = diagnosed(machine, settings)["router.device"]
    assert found.verdict == ("fault" if lacks else "ok")
    assert lacks in found.found


def test_fp8_experts_need_a_gpu_that_has_it() -> None:
    a100 = Gpu(name="A100", memory_bytes=80 << 30, capability="8.0")
    machine = torch_with(GPU, gpus=(a100, H200), peers=((False, True), (True, False)))
    for device, weights, lacks in (
        ("cuda", "fp8", "A100 has no FP8"), ("cuda:1", "fp8", ""), ("cuda", "bf16", ""),
    ):  # fmt: skip
        settings = Settings(expert=ExpertSettings(device=device, weights=weights))
        found = diagnosed(machine, settings)["expert.device"]
        assert found.verdict == ("fault" if lacks else "ok")
        assert lacks in found.found
