"""How many examples hypothesis tries: half of them in the quick tests."""

from __future__ import annotations

from typing import Any

import crossed
from hypothesis import settings


def examples(count: int, **more: Any) -> settings:
    """Settings of a test that tries `count` examples, or half of them where slow tests are left out."""
    return settings(max_examples=(count + 1) // 2 if crossed.only_quick else count, **more)
