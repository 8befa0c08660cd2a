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
ROOMS = ("specbatch", "kernels", "evals", "sweeps")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy, so that no build folder is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        tree,
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_the_top_level_is_specbatch(wheel):
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"specbatch"}


def test_every_file_of_the_rooms_is_in_the_wheel(wheel):
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix not in (".py", ".yaml", ".jinja", ".gz") and path.name not in ("py.typed", "LICENSE"):
                continue
            inside = path.relative_to(ROOT).as_posix()
            assert (inside if room == "specbatch" else f"specbatch/{inside}") in wheel


def test_every_folder_with_code_is_listed():
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    listed = {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}
    assert {name if name.startswith("specbatch") else f"specbatch.{name}" for name in listed} <= set(
        SETTINGS["packages"]
    )


@pytest.mark.parametrize("room", ["kernels", "evals", "sweeps", "tests"])
def test_rooms_beside_the_package_are_no_packages(room):
    assert not (ROOT / room / "__init__.py").exists()


def test_rooms_are_imported_under_the_one_name():
    naked = re.compile(r"^\s*(import|from) (kernels|evals|sweeps)\b", re.MULTILINE)
    files = [path for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 10
    assert [str(path) for path in files if naked.search(path.read_text())] == []
