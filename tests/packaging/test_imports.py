"""Import circles that the contracts of import-linter in pyproject.toml do not see."""

from __future__ import annotations

import ast
from pathlib import Path

from named_in import FOLDERS, ROOT, files_naming, imports_of, sources

# Files that import modules by a name in a string -> whose names.
BY_NAME = {
    "specbatch/__init__.py": "public names, loaded when they are first used",
    "specbatch/drafters/mtp.py": "the MTP head of a family",
    "specbatch/engine/setup/prepare.py": "drafters, from the registry of algorithms",
    "specbatch/models/registry.py": "families",
    "specbatch/models/decoder.py": "families",
    "specbatch/models/weight_shapes.py": "families",
    "specbatch/models/heads/layer_mtp.py": "the layers of a family",
    "specbatch/training/trainer.py": "trainable heads, from the registry of algorithms",
    "specbatch/weights/gguf_file.py": "layouts of families",
    "kernels/dispatch.py": "Triton kernels of operations",
}


def test_modules_that_are_imported_by_name() -> None:
    assert files_naming("import_module") == BY_NAME.keys()


def test_no_module_imports_the_package_that_it_is_in() -> None:
    """`from specbatch.weights import open_checkpoint` in specbatch/weights would run while its `__init__` does."""
    found = []
    for name in sources():
        path = ROOT / name
        inside = path.relative_to(ROOT / "specbatch" if path.is_relative_to(ROOT / "specbatch") else ROOT).parent
        packages = {".".join(("specbatch", *inside.parts[:depth])) for depth in range(1, len(inside.parts) + 1)}
        for node in imports_of(name):
            if isinstance(node, ast.ImportFrom) and node.module in packages:
                folder = _folder(node.module)
                names = {item.name for item in node.names}
                found += [f"{path}: {node.module}.{name}" for name in names if not _is_module(folder / name)]
    assert found == []


def _folder(package: str) -> Path:
    inside = Path(*package.split(".")[1:])
    return ROOT / inside if inside.parts and inside.parts[0] in FOLDERS else ROOT / "specbatch" / inside


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or path.is_dir()
