"""What this machine has that a mesh needs. Asks the system, decides nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

_TORCH_S = 120.0
_PLANES = {
    "shm": "ep_kernels.shm",
    "tcp": "ep_kernels.tcp",
    "gloo": "ep_kernels.group",
    "nccl": "ep_kernels.group",
    "symm": "ep_kernels.triton",
}
"""Data planes and what has them."""
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int
    capability: str


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """What ``compose.torch_probe`` found."""

    version: str
    cuda: str = ""
    """Version of CUDA that it was built for; empty: a build for CPUs."""
    cpu: str = ""
    """Widest instructions that it uses: DEFAULT, AVX2, AVX512."""
    fp16_kernel: bool = False
    bf16_tiles: bool = False
    """Whether the CPU has a matrix unit for bf16 that may be used."""
    gloo: bool = False
    nccl: str = ""
    """Version; empty where there is none, or no GPU that it could serve."""
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    """``peers[a][b]``: GPU a reads the memory of GPU b."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    python: str
    system: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    memory_limit_bytes: int
    """Of this process's control group; 0: none."""
    shm_bytes: int
    """Size of /dev/shm; 0: there is none."""
    open_files: int
    """Hard limit, to which services raise the soft one; -1: none."""
    locked_memory: int
    """Soft limit in bytes; -1: none."""
    memfd: str = ""
    """Why shared memory without a name cannot be made; empty when it can."""
    libraries_missing: tuple[str, ...] = ()
    """Compiled parts of moemesh that are not there."""
    planes: tuple[str, ...] = ()
    """Data planes that this version of moemesh has."""
    compiler: str = ""
    driver: str = ""
    """Version of NVIDIA's kernel driver; empty: none is loaded."""
    packages: dict[str, str] = {}
    """Versions of what is installed of triton and NCCL."""
    torch: Torch | None = None
    torch_error: str = ""
    """Why torch cannot be used, if it is installed."""


def look() -> Machine:
    """Takes a second or two: torch is imported in a process of its own."""
    torch, torch_error = _torch()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit_bytes=_memory_limit_bytes(),
        shm_bytes=_shm_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        memfd=_memfd_fault(),
        libraries_missing=tuple(_libraries_missing()),
        planes=tuple(name for name, home in _PLANES.items() if find_spec(home) is not None),
        compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "") or "",
        driver=_driver(),
        packages=dict(_packages("triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")),
        torch=torch,
        torch_error=torch_error,
    )


def _torch() -> tuple[Torch | None, str]:
    if not dict(_packages("torch")):
        return None, ""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "compose.torch_probe"],
            capture_output=True, timeout=_TORCH_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"it did not say within {_TORCH_S:g} s what it finds"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return None, lines[-1] if lines else f"it ended with {done.returncode}"
    return msgspec.json.decode(done.stdout, type=Torch), ""


def _packages(*names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            yield name, version(name)


def _libraries_missing() -> Iterator[str]:
    root = Path(__file__).parent.parent
    places = ("planner_svc", "ep_kernels", "kernels/ep_kernels")
    sources = [source for place in places for source in root.glob(f"{place}/native/*.c")]
    for source in sources:
        if not source.with_suffix(".so").exists():
            yield source.stem


def _memory_limit_bytes() -> int:
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError):
            text = path.read_text().strip()
            if text.isdigit() and int(text) < 1 << 60:
                return int(text)
    return 0


def _shm_bytes() -> int:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - looked at, not used
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _memfd_fault() -> str:
    try:
        fd = os.memfd_create("moemesh-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, 1 << 20)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


def _driver() -> str:
    try:
        words = _NVIDIA_DRIVER.read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
