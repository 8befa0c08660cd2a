"""constraints.txt names a version of every dependency, and pyproject.toml allows it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import specbatch

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_constraints_fit_the_dependencies() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(item.name): item for item in map(Requirement, lines)}
    extras = {name: items for name, items in PROJECT["optional-dependencies"].items() if name != "reasoning"}
    for text in [*PROJECT["dependencies"], *(item for items in extras.values() for item in items)]:
        needed = Requirement(text)
        if needed.name == "specbatch":
            continue
        (version, *_) = [str(part).lstrip("<>=~") for part in pinned[canonicalize_name(needed.name)].specifier]
        assert needed.specifier.contains(version.replace("*", "0")), text


def test_documented_ranges_are_those_of_the_project() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    needed = {
        item.name: item for item in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["all"])
    }
    for title in ("torch", "Triton", "transformers"):
        (stated,) = re.findall(rf"^\| {title} \| `([^`]+)`", page, re.MULTILINE)
        assert SpecifierSet(stated) == needed[title.lower()].specifier, title


def test_version_is_defined_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert f"## [{specbatch.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
