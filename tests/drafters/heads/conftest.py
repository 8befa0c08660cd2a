"""Draft heads on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from draft_heads import write_head


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """`write(config, tensors, ...)` -> the folder of a head."""
    return lambda *rest, **spelling: write_head(tmp_path / "head", *rest, **spelling)
