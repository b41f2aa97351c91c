"""``python -m compose.torch_probe``: what torch finds on this machine, as JSON.

A process of its own: torch may be missing, take long, or be ended by a driver that does not fit.
"""

from __future__ import annotations

import json
import sys


def probe() -> dict[str, object]:
    """Raises ``ImportError`` without torch."""
    import torch  # noqa: PLC0415 - is what this process is for
    from ep_kernels.half import has_kernel, has_tiles  # noqa: PLC0415 - needs torch

    found: dict[str, object] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "fp16_kernel": has_kernel(),
        "bf16_tiles": has_tiles(),
    }
    if not torch.cuda.is_available():
        return found
    count = torch.cuda.device_count()
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # it has no types
        found["nccl"] = ".".join(map(str, version))
    found["gpus"] = [
        {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
        for properties in map(torch.cuda.get_device_properties, range(count))
    ]
    found["peers"] = [
        [a != b and torch.cuda.can_device_access_peer(a, b) for b in range(count)]
        for a in range(count)
    ]
    return found


if __name__ == "__main__":
    try:
        json.dump(probe(), sys.stdout)
    except ImportError as error:
        sys.exit(f"{error}")
