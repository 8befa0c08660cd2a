"""Reads the JSON, TOML and YAML files of users and checkpoints: whatever is wrong with one is refused in one line.

Only regular files are opened, because a pipe or a device could block forever. Size and nesting are limited, so that a
file that can be read can also be walked, copied and shown.
"""

from __future__ import annotations

import codecs
import json
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from specbatch.errors import refuse, shown_json
from specbatch.files.atomic_file import is_leftover

DEEPEST = 100  # levels of lists and objects
LARGEST = {"JSON": 256 << 20, "TOML": 1 << 20, "YAML": 1 << 20}  # bytes; the readers of TOML and YAML are slow
TEMPORARY = "is a temporary file of specbatch, which its next run removes; give it another name"
_LONGEST = 200  # characters of a library's reason


class UnreadableError(ValueError):
    """Why a file cannot be read, as the rest of a sentence: "is not JSON (Expecting value at column 3)"."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises UnreadableError for whatever cannot be opened, for pipes, devices and
    folders, and for a temporary file of this package, which a later run removes."""
    if is_leftover(path):
        raise UnreadableError(TEMPORARY)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UnreadableError("is not a regular file")
        return path.open("rb")
    except UnreadableError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte or half of a surrogate pair in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UnreadableError(f"cannot be read ({reason})") from None


def read_bytes(path: Path, most: int = LARGEST["JSON"]) -> bytes:
    """The contents of a regular file of at most `most` bytes. Raises UnreadableError."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from None
    if len(content) > most:
        raise UnreadableError(f"is larger than {most >> 20} MiB")
    return content


def read_text(setting: str, path: Path, works: str = "name another file") -> str:
    """The UTF-8 text of a file, without a byte order mark. Raises SpecbatchError for `setting`; `works`: the advice."""
    try:
        return _decoded(read_bytes(path).removeprefix(codecs.BOM_UTF8))
    except UnreadableError as error:
        raise refuse(setting, str(path), f"{error}; {works}") from None


def read_json(setting: str, path: Path, works: str = "name another file", most: int | None = None) -> Any:
    """The value of a JSON file of at most `most` bytes. Raises SpecbatchError for `setting`; `works` is the advice."""
    return _read(setting, path, "JSON", works, most)


def read_toml(setting: str, path: Path, works: str = "name another file") -> dict[str, Any]:
    """The table of a TOML file. Raises SpecbatchError for `setting`; `works` is the advice."""
    found: dict[str, Any] = _read(setting, path, "TOML", works)
    return found


def read_yaml(setting: str, path: Path, works: str = "name another file") -> Any:
    """The value of a YAML file, in which `on` and `off` are text, as in YAML 1.2. Raises SpecbatchError for `setting`;
    `works` is the advice."""
    return _read(setting, path, "YAML", works)


def parse_json(text: bytes | str, *, unique: bool = False) -> Any:
    """The value of a JSON text. Raises UnreadableError for whatever is wrong with it. unique: an object that has a key
    twice is wrong, too; else the last value counts."""
    try:
        decoded = (text if isinstance(text, str) else text.decode()).strip(_BLANK)
        # `decode` takes three times as long for short texts, and one that looks at every key five times.
        found, end = _scan(decoded, 0)
        if end != len(decoded) or (unique and not _has_keys(found, decoded.count(":"))):
            raise StopIteration
    except (StopIteration, ValueError, RecursionError):
        decoded = text if isinstance(text, str) else _decoded(text)
        found = _decoded_by(_UNIQUE if unique else _PLAIN, decoded)
    if decoded.count("[") + decoded.count("{") > DEEPEST and _is_deep(found):
        raise UnreadableError(_TOO_DEEP.format(form="JSON"))
    return found


def _decoded_by(decoder: json.JSONDecoder, text: str) -> Any:
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        raise UnreadableError(f"is not JSON ({error.msg.removesuffix(' at')} at {place})") from None
    except RecursionError:
        raise UnreadableError(_TOO_DEEP.format(form="JSON")) from None
    except UnreadableError:  # of a key that is there twice
        raise
    except ValueError as error:  # a number with thousands of digits
        raise UnreadableError(f"is not JSON that can be read ({str(error).partition(';')[0]})") from None


def _has_keys(value: Any, colons: int) -> bool:
    """Whether its objects have as many keys as its JSON text has colons. Then no object of the text has a key twice."""
    if type(value) is dict and len(value) == colons:
        return True
    keys, found = 0, [value]
    for item in found:
        kind = type(item)
        if kind is str:
            continue
        if kind is dict:
            keys += len(item)
            found += item.values()
        elif kind is list:
            found += item
    return keys == colons


def _read(setting: str, path: Path, form: str, works: str, most: int | None = None) -> Any:
    try:
        content = read_bytes(path, most or LARGEST[form]).removeprefix(codecs.BOM_UTF8)
        found = parse_json(content) if form == "JSON" else _parse_config(_decoded(content), form)
        _check_text(found, content)
    except UnreadableError as error:
        raise refuse(setting, str(path), f"{error}; {works}") from None
    return found


def _parse_config(text: str, form: str) -> Any:
    """The value of a TOML or YAML text."""
    try:
        found = tomllib.loads(text) if form == "TOML" else _load_yaml(text)
    except RecursionError:
        raise UnreadableError(_TOO_DEEP.format(form=form)) from None
    except Exception as error:  # PyYAML raises KeyError, AttributeError and others for values that do not fit their tag
        raise UnreadableError(f"is not {form} ({' '.join(str(error).split())[:_LONGEST]})") from None
    if _is_deep(found):
        raise UnreadableError(_TOO_DEEP.format(form=form))
    return found


def _load_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads `on` and `off` as text."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [(tag, form) for tag, form in known if first in "tTfF" or not tag.endswith(":bool")]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return yaml.load(text, Loader)


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not UTF-8 (byte {error.start + 1})") from None


def _check_text(found: Any, content: bytes) -> None:
    """Refuse half of a surrogate pair, which JSON can escape, but which no file or terminal can hold."""
    if b"\\u" in content:
        try:
            json.dumps(found, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise UnreadableError("is not text (it has half of a surrogate pair)") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these keys and values. Raises UnreadableError for a key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UnreadableError(f"has the key {shown_json(twice, 60)} more than once in an object")
    return found


_BLANK = " \t\n\r"  # around a JSON value
_PLAIN, _UNIQUE = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_unique)
_scan: Callable[[str, int], tuple[Any, int]] = _PLAIN.scan_once  # type: ignore[attr-defined]
_TOO_DEEP = "is not {form} that can be read (nested too deeply)"


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than `DEEPEST` times. A YAML value may be in many places, or in itself;
    each level has it once."""
    level = {id(value): value}
    for _ in range(DEEPEST):
        level = {id(item): item for parent in level.values() for item in _items(parent)}
        if not level:
            return False
    return True


def _items(value: Any) -> list[Any]:
    """The lists and objects that are items of a value."""
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in found if isinstance(item, (dict, list))]
