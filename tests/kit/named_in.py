"""Which product files name something in their code, to test that an addition touches few of them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("specbatch", "kernels", "evals", "sweeps")


def files_naming(name: str) -> set[str]:
    """Paths of the product files whose code has `name` as a word of an identifier, of an import or of a string.
    Underscores and dots separate words; comments and docstrings do not count."""
    word = re.compile(rf"(?<![a-zA-Z0-9]){re.escape(name)}(?![a-zA-Z0-9])")
    return {path for path, texts in _texts().items() if any(word.search(text) for text in texts)}


@cache
def _texts() -> dict[str, frozenset[str]]:
    """By file, its identifiers, the modules that it imports and its strings."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): frozenset(_texts_of(path)) for path in paths}


def _texts_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "name", "attr", "arg", "module", "asname"):
            if isinstance(text := getattr(node, field, None), str):
                found.add(text)
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{item.name}" for item in node.names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found - {text for node in ast.walk(tree) for text in _docstring(node)}


def _docstring(node: ast.AST) -> list[str]:
    """The text of a statement that is only a string."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return [node.value.value] if is_text else []
