"""Reads and refuses settings of a `quantization_config`, for the formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.config_values import names_of, spelled, table_of
from specbatch.models.formats.format import PATTERN, Format, Group, Modules, is_pattern

KEY = "quantization_config"


def unquantized(found: dict[str, Any], *keys: str) -> Modules:
    """Names and patterns of the modules that are not quantized, listed under one of these keys."""
    key = spelled(found, *keys)
    listed = names_of(found, key) or []
    patterns = check_patterns(key, listed)
    return frozenset(listed) - set(patterns), tuple(patterns)


def check_patterns(key: str, names: Iterable[str]) -> list[str]:
    """The patterns among names of modules, which must be regular expressions or have wildcards."""
    patterns = [name for name in names if is_pattern(name)]
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix(PATTERN) if pattern.startswith(PATTERN) else "")
        except re.error as error:
            raise refuse_setting(key, pattern, f"it is no regular expression ({error})") from None
    return patterns


def entries(
    found: dict[str, Any], key: str, *works: str, also: Iterable[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a table of layers under `key`, which must have no other settings than these. also: ones that say
    nothing of the stored weights."""
    table = table_of(found, key)
    for name in table:
        entry = table_of(table, name)
        for other in sorted(entry.keys() - {*works, *also}):
            raise refuse_setting(f"{key}.{name}.{other}", entry[other], f"use {', '.join(works)}")
        yield name, entry


def of_entry(where: str, read: Callable[[dict[str, Any]], Format], settings: dict[str, Any]) -> Format:
    """The format that `read` finds in the settings of an entry at `where`, which error messages name."""
    try:
        return read(settings)
    except SpecbatchError as error:
        key = str(error.setting).removeprefix(f"{KEY}.")
        works = str(error.works).partition(";")[0]
        raise refuse_setting(f"{where}.{key}", error.value, works) from None


def packing_of(group: Group, *works: str) -> str:
    """The `format` of a group of compressed-tensors, or of all; by default the first of those that work."""
    default = group.config.get("format", works[0])
    expect(group.settings, "format", *works, default=default, where=group.where)
    return str(group.settings.get("format") or default)


def activations_of(group: Group) -> str | None:
    """The type of activations for which a group of compressed-tensors was made; None: unquantized ones."""
    found = table_of(group.settings, "input_activations")
    if not found:
        return None
    return f"{'FP' if found.get('type') == 'float' else 'INT'}{found.get('num_bits')}"


def expect(found: dict[str, Any], key: str, *works: Any, default: Any = None, where: str = "") -> None:
    """Refuse another value than these. where: the place of `found` in the quantization_config."""
    value = found.get(key)
    value = default if value is None else value
    if value not in works:
        wanted = " or ".join(repr(one) for one in works)
        raise refuse_setting(f"{where}.{key}".lstrip("."), value, f"it must be {wanted}")


def refuse_setting(key: str, value: Any, works: str) -> SpecbatchError:
    return refuse(f"{KEY}.{key}", value, f"{works}; else use unquantized weights or a GGUF file")
