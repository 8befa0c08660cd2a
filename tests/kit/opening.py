"""Engines over checkpoints in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def opening(opened: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `opened(model, load_format, ...)` is in place of `specbatch.weights.open_checkpoint`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbatch.weights.open_checkpoint", opened)
        yield
