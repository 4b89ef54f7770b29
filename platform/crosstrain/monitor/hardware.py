"""Memory in use, utilization and peak throughput of a device."""

import resource
import sys
from pathlib import Path

import torch

MIB = 1 << 20

# Part of the device's name -> dense bf16/fp16 FLOP/s from the vendor's data sheet.
_PEAK_HALF = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "A800": 312e12, "H800": 989e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def memory_mb(device: torch.device) -> dict[str, float]:
    """Return the MiB in use on the GPU (allocated, reserved, peaks) or, on a CPU, by this process (resident, peak)."""
    if device.type == "cuda":
        return {
            "memory_allocated_mb": torch.cuda.memory_allocated(device) / MIB,
            "memory_peak_mb": torch.cuda.max_memory_allocated(device) / MIB,
            "memory_reserved_mb": torch.cuda.memory_reserved(device) / MIB,
            "memory_reserved_peak_mb": torch.cuda.max_memory_reserved(device) / MIB,
        }
    status = Path("/proc/self/status")
    if status.exists():  # the peak from getrusage is inherited from the parent process
        kib = dict(line.split(":", 1) for line in status.read_text().splitlines())
        names = {"memory_allocated_mb": "VmRSS", "memory_peak_mb": "VmHWM"}
        return {name: int(kib[key].split()[0]) * 1024 / MIB for name, key in names.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"memory_peak_mb": peak / MIB}


def gpu_utilisation(device: torch.device) -> float | None:
    """Return the percentage of recent time in which the GPU was busy, or None without a GPU or nvidia-ml-py."""
    try:
        return float(torch.cuda.utilization(device)) if device.type == "cuda" else None
    except Exception:  # nvidia-ml-py and each driver raise their own errors
        return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a known GPU in half precision; None for other devices and precisions."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_HALF.items() if part in name), None)
