"""What a machine can do for a mesh, and what to install or raise if it cannot. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from compose.machine import Gpu, Machine, Torch
from mesh.settings import Settings

Verdict = Literal["ok", "note", "fault"]
"""fault: a service could not run, or not as configured."""
_FILES_BESIDE_CLIENTS = 256
_LEAST_NCCL_SHM = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - named, not used
_LEAST_DRIVER = {"12": 525, "13": 580}
"""Oldest NVIDIA driver for a CUDA major version."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    about: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do, where there is something."""


def findings(machine: Machine, settings: Settings) -> tuple[Finding, ...]:
    """All that matters of ``machine`` for services with these settings."""
    return (
        *_system(machine, settings),
        *_torch(machine),
        *_gpus(machine),
        *_devices(machine, settings),
        *_planes(machine, settings),
        *_limits(machine, settings),
    )


def _system(machine: Machine, settings: Settings) -> Iterator[Finding]:
    mesh = settings.mesh
    limit = f", {_size(machine.memory_limit_bytes)} allowed" if machine.memory_limit_bytes else ""
    yield _ok("system", f"{machine.system}, Python {machine.python}")
    yield _ok("memory", f"{_size(machine.memory_bytes)}{limit}")
    busy = mesh.routers * settings.router.threads + mesh.experts * settings.expert.threads
    if busy > machine.cores:
        yield Finding(
            about="cores",
            verdict="note",
            found=f"{machine.cores} for {busy} threads that compute",
            advice="on this machine alone, fewer routers, workers or threads would be as fast",
        )
    else:
        yield _ok("cores", f"{machine.cores} for {busy} threads that compute")
    if machine.libraries_missing:
        yield Finding(
            about="compiled parts",
            verdict="fault",
            found=f"not there: {', '.join(machine.libraries_missing)}",
            advice="install moemesh again: `pip install .` compiles them",
        )
    else:
        yield _ok("compiled parts", "all there")


def _torch(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch
    if torch is None:
        yield Finding(
            about="torch",
            verdict="fault" if machine.torch_error else "note",
            found=machine.torch_error or "not installed: gateway and planner run, no other service",
            advice=f"pip install 'moemesh[{_extra(machine)}]'",
        )
        return
    build = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
    yield _ok("torch", f"{torch.version} {build}; instructions: {torch.cpu or 'unknown'}")
    if torch.fp16_kernel:
        unit = "; those that bf16 holds: on its matrix unit (AMX)" if torch.bf16_tiles else ""
        yield _ok("16-bit weights", f"a kernel for this CPU{unit}")
    else:
        yield Finding(
            about="16-bit weights",
            verdict="note",
            found="no kernel for this CPU, which has neither AVX-512 nor AVX2 with FMA and F16C: "
            "matrices stay fp32, at twice the memory traffic",
        )


def _extra(machine: Machine) -> str:
    if not machine.driver:
        return "cpu"
    major = _major(machine.driver)
    return "gpu-cu13" if major == 0 or major >= _LEAST_DRIVER["13"] else "gpu-cu12"


def _gpus(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch
    if not machine.driver:
        found = "no NVIDIA driver is loaded: routers and expert workers compute on CPUs"
        yield Finding(about="driver", verdict="note", found=found)
    else:
        yield _driver(machine, torch)
    if torch is None or not torch.gpus:
        return
    yield _ok(
        "GPUs",
        "; ".join(
            f"{index}: {gpu.name}, {_size(gpu.memory_bytes)}, sm_{gpu.capability.replace('.', '')}"
            for index, gpu in enumerate(torch.gpus)
        ),
    )
    if len(torch.gpus) > 1:
        yield _peers(torch)
    if {"nvidia-nccl-cu12", "nvidia-nccl-cu13"} <= machine.packages.keys():
        yield Finding(
            about="NCCL",
            verdict="fault",
            found="nvidia-nccl-cu12 and nvidia-nccl-cu13 are installed: both write one library",
            advice=f"uninstall both, then pip install 'moemesh[{_extra(machine)}]'",
        )
    elif torch.nccl:
        yield _ok("NCCL", torch.nccl)
    if "triton" not in machine.packages:
        yield Finding(
            about="Triton",
            verdict="fault",
            found="not installed",
            advice=f"pip install 'moemesh[{_extra(machine)}]'",
        )
    elif not machine.compiler:
        yield Finding(
            about="Triton",
            verdict="fault",
            found=f"{machine.packages['triton']}, and no C compiler for its kernels' launchers",
            advice="apt-get install gcc libc6-dev python3-dev, or set CC",
        )
    else:
        yield _ok("Triton", f"{machine.packages['triton']} with {machine.compiler}")


def _devices(machine: Machine, settings: Settings) -> Iterator[Finding]:
    """Whether the devices that services are to compute on are here."""
    router, expert = settings.router, settings.expert
    for key, device, count in (
        ("router.device", router.device, router.tp),
        ("expert.device", expert.device, 1),
    ):
        if device == "cpu":
            continue
        torch = machine.torch
        seen = () if torch is None else torch.gpus
        gpus = len(seen)
        index = int(device.partition(":")[2] or 0)
        on_gpu = device != "interpreter"
        if "triton" not in machine.packages:
            lacks = "Triton is not installed"
            extra = f"'moemesh[{_extra(machine) if machine.driver else 'gpu'}]'"
            advice = f"pip install {'triton' if device == 'interpreter' else extra}"
        elif on_gpu and index + count > gpus:
            lacks = f"torch sees {gpus} GPUs" + (", counted from 0" if gpus else "")
            if count > 1:
                lacks += f"; router.tp = {count} takes as many from this one on"
            advice = "another device, or what `driver` says above"
        elif on_gpu and count > 1 and (torch is None or not torch.nccl):
            lacks = f"router.tp = {count} needs NCCL"
            advice = "what `NCCL` says above"
        elif (
            on_gpu
            and key == "expert.device"
            and expert.weights == "fp8"
            and not _has_fp8(seen[index])
        ):
            lacks = f"{seen[index].name} has no FP8"
            advice = "expert.weights = bf16"
        else:
            yield _ok(key, f"{device} is here")
            continue
        yield Finding(
            about=key,
            verdict="fault",
            found=f"{device}, and {lacks}",
            advice=f"{advice}, or {key} = cpu",
        )


def _has_fp8(gpu: Gpu) -> bool:
    """Whether its matrix units take FP8, as far as our kernels are made for them: Hopper on."""
    return int(gpu.capability.partition(".")[0]) >= 9


def _driver(machine: Machine, torch: Torch | None) -> Finding:
    found = machine.driver
    if torch is None:
        return _ok("driver", found)
    if not torch.cuda:
        return Finding(
            about="driver",
            verdict="note",
            found=f"{found}, but torch is a build for CPUs",
            advice=f"pip install 'moemesh[{_extra(machine)}]'",
        )
    least = _LEAST_DRIVER.get(torch.cuda.partition(".")[0], 0)
    if 0 < _major(found) < least:
        return Finding(
            about="driver",
            verdict="fault",
            found=f"{found} is too old for CUDA {torch.cuda}, which needs {least}",
            advice="a newer driver, or pip install 'moemesh[gpu-cu12]'",
        )
    if not torch.gpus:
        return Finding(
            about="driver",
            verdict="fault",
            found=f"{found}, and torch sees no GPU",
            advice="look at CUDA_VISIBLE_DEVICES, at the container's devices, and at nvidia-smi",
        )
    return _ok("driver", found)


def _peers(torch: Torch) -> Finding:
    count = len(torch.gpus)
    apart = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.peers[a][b]]
    if not apart:
        return _ok("peer access", "every GPU reads every other's memory")
    return Finding(
        about="peer access",
        verdict="note",
        found=f"none between {', '.join(apart)}: what goes between them passes the host",
    )


def _planes(machine: Machine, settings: Settings) -> Iterator[Finding]:
    chosen = settings.network.data_plane
    if machine.memfd:
        yield Finding(
            about="lanes in shared memory",
            verdict="fault",
            found=f"memory without a name cannot be made: {machine.memfd}",
            advice="allow memfd_create (Linux 3.17, and the container's seccomp profile)",
        )
    else:
        yield _ok("lanes in shared memory", "between processes of this host that share a run_dir")
    if "tcp" in machine.planes:
        yield _ok("lanes over TCP", "between hosts, where expert workers listen (network.listen)")
    torch = machine.torch
    if torch is None:
        return
    if "gloo" in machine.planes:
        yield _plane(
            "lanes over gloo",
            "" if torch.gloo else "torch has no gloo",
            "between hosts, where they are chosen; over TCP they are faster",
            f"pip install 'moemesh[{_extra(machine)}]'",
            chosen=chosen == "gloo",
        )
    if "nccl" in machine.planes:
        yield _nccl(machine, torch, settings, chosen=chosen == "nccl")
    if "symm" in machine.planes:
        yield _symm(machine, settings, chosen=chosen == "symm")


def _nccl(machine: Machine, torch: Torch, settings: Settings, *, chosen: bool) -> Finding:
    why = advice = ""
    found = f"NCCL {torch.nccl}, where they are chosen; no card has tried them"
    if not torch.nccl:
        if torch.gpus:
            why, advice = "torch has no NCCL", f"pip install 'moemesh[{_extra(machine)}]'"
        else:
            why = "torch sees no GPU" if machine.driver else "no GPU"
    elif elsewhere := _not_on(("cuda",), settings):
        why, advice = f"they join GPUs, and {elsewhere}", _ON_CUDA
    elif len(torch.gpus) == 1:
        found += "; not between two processes on one GPU, and here is one"
    return _plane("lanes over NCCL", why, found, advice, chosen=chosen)


def _symm(machine: Machine, settings: Settings, *, chosen: bool) -> Finding:
    why = advice = ""
    found = "on this host, where they are chosen; no card has tried them"
    if "triton" not in machine.packages:
        why = "Triton is not installed"
        extra = f"'moemesh[{_extra(machine)}]'" if machine.driver else "triton"
        advice = f"pip install {extra}"
    elif elsewhere := _not_on(("cuda", "interpreter"), settings):
        why, advice = f"they join devices, and {elsewhere}", _ON_CUDA
    return _plane("lanes in symmetric memory", why, found, advice, chosen=chosen)


_ON_CUDA = "router.device = cuda and expert.device = cuda"


def _not_on(kinds: tuple[str, ...], settings: Settings) -> str:
    """Which roles compute elsewhere than on one of the kinds of devices, both on the same; or
    nothing.
    """
    devices = {"router.device": settings.router.device, "expert.device": settings.expert.device}
    found = {key: device.partition(":")[0] for key, device in devices.items()}
    wrong = [f"{key} = {devices[key]}" for key, kind in found.items() if kind not in kinds]
    if not wrong and len(set(found.values())) > 1:
        wrong = [f"{key} = {device}" for key, device in devices.items()]
    return " and ".join(wrong)


def _plane(about: str, why_not: str, found: str, advice: str, *, chosen: bool) -> Finding:
    if not why_not:
        return _ok(about, found)
    if chosen:
        other = "network.data_plane = auto"
        return Finding(
            about=about,
            verdict="fault",
            found=f"none, and network.data_plane asks for them: {why_not}",
            advice=f"{advice}, or {other}" if advice else other,
        )
    return Finding(about=about, verdict="note", found=f"none: {why_not}", advice=advice)


def _limits(machine: Machine, settings: Settings) -> Iterator[Finding]:
    need = settings.gateway.max_connections + _FILES_BESIDE_CLIENTS
    if 0 <= machine.open_files < need:
        yield Finding(
            about="open files",
            verdict="fault",
            found=f"{machine.open_files} allowed, {need} needed by a gateway with "
            f"{settings.gateway.max_connections} connections (gateway.max_connections)",
            advice=f"raise the hard limit: ulimit -Hn {need} as root, or LimitNOFILE=",
        )
    else:
        yield _ok("open files", "no limit" if machine.open_files < 0 else str(machine.open_files))
    gpus = machine.torch is not None and bool(machine.torch.gpus)
    if gpus and 0 <= machine.locked_memory < 1 << 30:
        yield Finding(
            about="locked memory",
            verdict="note",
            found=f"{_size(machine.locked_memory)} allowed; NCCL over InfiniBand needs more",
            advice="ulimit -l unlimited, or LimitMEMLOCK=infinity",
        )
    if gpus and machine.shm_bytes < _LEAST_NCCL_SHM:
        yield Finding(
            about=_SHM,
            verdict="note",
            found=f"{_size(machine.shm_bytes)}; NCCL within a host uses up to 1 GiB",
            advice="shm_size in the compose file, or mount -o remount,size=2g /dev/shm",
        )
    else:
        yield _ok(_SHM, f"{_size(machine.shm_bytes)}; lanes do not use it")


def _ok(about: str, found: str) -> Finding:
    return Finding(about=about, verdict="ok", found=found)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count //= 1024
    return f"{count} GiB"
