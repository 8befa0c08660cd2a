"""Creates the context of a CUDA device while torch is imported, as each of the two takes a second or more."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def make_context_ahead(device: str) -> None:
    """Start a thread that creates the primary context of the device (auto, cuda, cuda:N), which torch will use. If
    there is no driver or no such device, or torch is built for CPUs, it does nothing: torch reports that later."""
    if device != "cpu" and is_built_for_cuda():
        # Not a daemon thread: a command that ends at once with an error must not exit while the driver initializes.
        threading.Thread(target=_make_context, args=(int(device.partition(":")[2] or 0),)).start()


def is_built_for_cuda() -> bool:
    """Whether torch is, without importing it."""
    found = find_spec("torch")
    return found is not None and (Path(found.origin or "").parent / "lib" / "libtorch_cuda.so").exists()


def _make_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # its calls release the GIL
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
