"""Garbage collection while a device works: full collections are rare, and those of young objects are short."""

from __future__ import annotations

import gc
import threading

# See `gc.set_threshold`. A full collection walks all objects of the process, some hundred thousand after the imports:
# 0.1 s and more, in which the device runs dry. With Python's own thresholds there is one every few seconds at 256
# requests and more, because the objects of a step count. The first threshold is above what a step of 1,024 requests
# makes. With the second, a collection of young objects takes a few milliseconds, by which the host is ahead.
_THRESHOLDS = 5_000, 2, 1_000


class RareCollections:
    """While this is entered, by any number of threads, the thresholds are those for work on a device. Afterwards they
    are what they were, unless someone else has set them. An application that collects nothing automatically is left
    alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._usual = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._usual = gc.get_threshold()
                if self._usual[0]:
                    gc.set_threshold(*_THRESHOLDS)
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and gc.get_threshold() == _THRESHOLDS:
                gc.set_threshold(*self._usual)


rare_collections = RareCollections()
