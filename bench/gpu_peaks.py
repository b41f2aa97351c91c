"""What the card does at best in this run: the measure for all other sections."""

from __future__ import annotations

import torch
from gpu_harness import BF16, COPY, FP8, Meter


def peaks(meter: Meter, side: int = 8192, copied_bytes: int = 1 << 31) -> None:
    a = torch.randn(side, side, device=meter.device, dtype=torch.bfloat16)
    b = torch.randn(side, side, device=meter.device, dtype=torch.bfloat16).t()
    flops = 2.0 * side**3
    meter.row("peaks", BF16, flops / meter.milliseconds(lambda: a @ b) / 1e9, "TFLOP/s")
    source = torch.empty(copied_bytes // 2, dtype=torch.uint8, device=meter.device)
    target = torch.empty_like(source)
    milliseconds = meter.milliseconds(lambda: target.copy_(source))
    meter.row("peaks", COPY, copied_bytes / milliseconds / 1e6, "GB/s")  # read and written
    if torch.cuda.get_device_capability(meter.device) >= (9, 0):
        scale = torch.ones((), device=meter.device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        milliseconds = meter.milliseconds(
            lambda: torch._scaled_mm(a8, b8, scale, scale, out_dtype=torch.bfloat16)  # noqa: SLF001
        )
        meter.row("peaks", FP8, flops / milliseconds / 1e9, "TFLOP/s")


SECTIONS = {"peaks": peaks}
