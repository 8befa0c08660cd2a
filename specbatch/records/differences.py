"""Compares two sets of settings and describes what differs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

SHOWN = 40  # characters of a value


def describe_differences(old: dict[str, Any], new: dict[str, Any], names: Collection[str]) -> str:
    """What differs among `names` between settings on disk and those of now: "temperature (0.7 there, 0.0 now)"."""
    parts = []
    for name in names:
        before, after = old.get(name), new[name]
        if isinstance(before, dict) and isinstance(after, dict):
            nested = [key for key in after if before.get(key) != after[key]]
            parts.append(describe_differences(before, after, nested))
        elif name.endswith("_sha256"):
            hashed = name.removesuffix("_sha256")
            if hashed not in names:  # the value itself is more useful than its hash
                parts.append(hashed.replace("input", "input file"))
        else:
            there = f"{_said(before)} there" if name in old else "not set by the version there"
            parts.append(f"{name} ({there}, {_said(after)} now)")
    return ", ".join(dict.fromkeys(parts))


def _said(value: object) -> str:
    return "not set" if value is None else repr(value)


def conflicts(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Settings that both have with different values, each as "name value and value"; nested ones under dotted names."""
    common = [name for name in before if name in after]
    old, new = (flatten({name: settings[name] for name in common}) for settings in (before, after))
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return [f"{name} {shortened(old.get(name))} and {shortened(new.get(name))}" for name in names]


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def shortened_pair(before: object, after: object) -> tuple[str, str]:
    """Two different values, shortened; from the word that differs where their beginnings are the same."""
    old, new = shortened(before), shortened(after)
    if old == new:
        whole = str(before), str(after)
        same = next((at for at, (a, b) in enumerate(zip(*whole, strict=False)) if a != b), min(map(len, whole)))
        start = max(whole[0].rfind(" ", 0, same) + 1, same - SHOWN // 2)  # a word may be a long path
        old, new = (shortened(f"...{text[start:]}") for text in whole)
    return old, new


def shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
