"""Versions and hardware that a number depends on."""

from __future__ import annotations

import os
import platform
import re
import sys
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from specbatch.version import __version__


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the libraries it runs on."""
    found = {"python": platform.python_version(), "specbatch": __version__}
    for name in ("torch", "triton", "transformers", "tokenizers", "lm_eval", "datasets", "llvmlite"):
        if (version := _version(name)) is not None:
            found[name] = version
    return found


@cache
def _version(package: str) -> str | None:
    """Of an installed package. Each record has it, and the package's metadata takes milliseconds to parse."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hardware(device: str | None = None) -> dict[str, Any]:
    """Processor, memory, NVIDIA driver and, where torch is already loaded and sees one, the GPU with its CUDA.

    device: of the run, such as "cuda:1"; without a number the GPU is the current one."""
    import psutil

    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu": _cpu_name(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            place = (device or "").partition("cuda:")[2]
            properties = torch.cuda.get_device_properties(int(place) if place else torch.cuda.current_device())
            found["gpu"] = properties.name
            found["gpu_id"] = sha256(str(properties.uuid).encode()).hexdigest()[:8]
            found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
            found["cuda"] = torch.version.cuda
    if (driver := nvidia_driver()) is not None:
        found["driver"] = driver
    return found


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """The version of the NVIDIA driver, from the files of the kernel below `root`."""
    try:
        return (root / "sys/module/nvidia/version").read_text().strip()
    except OSError:
        pass
    try:  # NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ...
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", (root / "proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
