"""Ctrl-C and SIGTERM that take effect after work that must not end in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class DeferredInterrupts:
    """Within this context, Ctrl-C and SIGTERM are noted and take effect at the end. Blocking signals would not do:
    another thread would receive them, and Python runs their handlers in the main thread all the same."""

    def __init__(self, *, once: bool = False) -> None:
        """once: a second one takes effect at once, for work that may take long."""
        self._once = once

    def __enter__(self) -> None:
        self._noted: int | None = None
        self._handlers: dict[int, Handler] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._once and self._noted is not None:
            self._handlers[number](number, frame)
        self._noted = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._noted is not None:
            self._handlers[self._noted](self._noted, None)
