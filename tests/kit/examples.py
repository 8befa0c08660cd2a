"""How many examples hypothesis tries: half of them in the quick tests."""

from __future__ import annotations

from typing import Any

import crossed
from hypothesis import settings


def examples(count: int, quick: int | None = None, **more: Any) -> settings:
    """Settings of a test that tries `count` examples, or `quick` (default: half) where slow tests are left out."""
    fewer = (count + 1) // 2 if quick is None else quick
    return settings(max_examples=fewer if crossed.only_quick else count, **more)
