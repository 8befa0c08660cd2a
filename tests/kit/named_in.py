"""Which product files name something in their code, to test that an addition touches few of them."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("specbatch", "kernels", "evals", "sweeps")


def files_naming(name: str) -> set[str]:
    """Paths of the product files whose code has `name` as a word of an identifier, of an import or of a string.
    Underscores and dots separate words; comments and docstrings do not count."""
    word = re.compile(rf"(?<![a-zA-Z0-9]){re.escape(name)}(?![a-zA-Z0-9])")
    parts = name.split(".")  # of an import, in two places of a statement
    some = [path for path, source in sources().items() if all(part in source for part in parts)]  # few to be parsed
    return {path for path in some if any(word.search(text) for text in _texts_of(path))}


@cache
def sources() -> dict[str, str]:
    """The text of each product file by its path."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def imports_of(path: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a product file: they are lines, of which the others need not be parsed."""
    return [
        node
        for text in _IMPORT.findall(sources()[path])
        for node in ast.parse(textwrap.dedent(text)).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(?:\([^)]*\)|[^(\n;#]+)", re.MULTILINE)

# Kind of node -> its fields with identifiers and modules.
_NAMES = {
    kind: [field for field in kind._fields if field in ("id", "name", "attr", "arg", "module", "asname")]
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}


@cache
def _texts_of(path: str) -> frozenset[str]:
    """The identifiers of a file, the modules that it imports and its strings."""
    found, docstrings = set[str](), set[str]()
    for node in ast.walk(ast.parse(sources()[path])):
        found |= {text for field in _NAMES[type(node)] if isinstance(text := getattr(node, field), str)}
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Expr):
            docstrings.update(_docstring(node))
    return frozenset(found - docstrings)


def _docstring(node: ast.AST) -> list[str]:
    """The text of a statement that is only a string."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return [node.value.value] if is_text else []
