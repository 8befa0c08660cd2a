"""Makes the context of a CUDA device while torch is imported: each of them takes a second or more."""

from __future__ import annotations

import ctypes
import threading
from functools import cache


@cache
def make_context_ahead(device: str) -> None:
    """Begin to make the context that torch will use on the device (auto, cuda, cuda:N), in a thread. Where there is no
    driver or no such device nothing happens, as torch will say so."""
    if device != "cpu":
        # Not a daemon: a command that ends at once, with an error, must not end while the driver starts.
        threading.Thread(target=_make_context, args=(int(device.partition(":")[2] or 0),)).start()


def _make_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # while it works, other threads run
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
