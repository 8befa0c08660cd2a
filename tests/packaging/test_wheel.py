"""The wheel installs one import name, and nothing called `kernels` is importable from a checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("specbatch", "kernels", "evals", "sweeps")
CHECKOUT_ONLY = ROOT / "sweeps" / "microbench"  # benchmarks of single operations
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no build folder is left in the checkout."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> list[str]:
    """The names in a wheel."""
    folder = tree.parent
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_top_level_is_specbatch(wheel):
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"specbatch"}


def test_every_file_is_in_the_wheel_but_those_of_a_checkout(wheel):
    for name in FOLDERS:
        for path in (ROOT / name).rglob("*"):
            suffixes = (".py", ".json", ".yaml", ".jinja", ".gz")
            if path.suffix not in suffixes and path.name not in ("py.typed", "LICENSE"):
                continue
            inside = path.relative_to(ROOT).as_posix()
            found = (inside if name == "specbatch" else f"specbatch/{inside}") in wheel
            assert found != path.is_relative_to(CHECKOUT_ONLY), inside


def test_nothing_in_the_wheel_imports_what_is_not():
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    assert any(path.is_relative_to(CHECKOUT_ONLY) for path in files)
    shipped = [path for path in files if not path.is_relative_to(CHECKOUT_ONLY)]
    imports = re.compile(r"^\s*(from|import) specbatch\.sweeps\.microbench|import microbench\b", re.MULTILINE)
    assert [str(path) for path in shipped if imports.search(path.read_text())] == []


def test_editable_installation_is_a_path_that_type_checkers_read(tree, tmp_path):
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        (name,) = [name for name in file.namelist() if ".dist-info/" not in name]
        assert name.endswith(".pth"), "a module is an import hook"
        assert file.read(name).decode().strip() == str(tree)


def test_every_folder_with_code_is_listed():
    folders = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")} - {CHECKOUT_ONLY}
    listed = {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}
    listed = {name if name.startswith("specbatch") else f"specbatch.{name}" for name in listed}
    assert listed <= set(SETTINGS["packages"])
    assert "specbatch.sweeps.microbench" not in SETTINGS["packages"]


def test_folders_are_imported_under_specbatch_only():
    assert [name for name in (*FOLDERS[1:], "tests") if (ROOT / name / "__init__.py").exists()] == []
    naked = re.compile(r"^\s*(import|from) (kernels|evals|sweeps)\b", re.MULTILINE)
    files = [path for name in (*FOLDERS, "tests") for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 10
    assert [str(path) for path in files if naked.search(path.read_text())] == []
