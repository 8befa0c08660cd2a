"""Optional packages: the modules that each extra of pyproject.toml adds, and the error where one is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from specbatch.errors import SpecbatchError

EXTRAS: dict[str, tuple[str, ...]] = {
    "http": ("aiohttp", "prometheus_client"),
    "ray": ("ray",),
    "reasoning": ("reasoning_gym",),
}


def missing(extra: str) -> str | None:
    """What to install if a module of `extra` is missing, None if all are installed. Imports nothing."""
    absent = [module for module in EXTRAS[extra] if not is_installed(module)]
    return f"{', '.join(absent)} not installed; pip install 'specbatch[{extra}]'" if absent else None


def needs(extra: str) -> None:
    """Refuse to go on without the modules of `extra`. Called before a command starts work that would end in an
    ImportError."""
    if reason := missing(extra):
        raise SpecbatchError(reason)


def is_installed(module: str) -> bool:
    """Whether a module can be imported; it is not imported."""
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
