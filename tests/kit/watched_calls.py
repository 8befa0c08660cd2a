"""Watches calls of methods and functions, which run as they are: what tests with the fixture `watch` are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest


class Watch(Protocol):
    def __call__(
        self,
        owner: object,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Filled as the calls come: what `before(*arguments)` and `after(result, *arguments)` return."""


def watch_with(patch: pytest.MonkeyPatch) -> Watch:
    def watch(
        owner: object,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> list[Any]:
        function, seen = getattr(owner, name), list[Any]()

        def call(*args: Any, **how: Any) -> Any:
            seen.extend([before(*args, **how)] if before else [])
            result = function(*args, **how)
            seen.extend([after(result, *args, **how)] if after else [])
            return result

        patch.setattr(owner, name, call)
        return seen

    return watch
