"""Published tables are what the records beside them make."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

RESULTS = Path(__file__).parents[1] / "results"
ARCHIVES = sorted(RESULTS.rglob("*.tar.xz"))
MOST_BYTES = 3_000_000  # of one archive: 60 bytes per request
QUICK_BYTES = 40_000  # of one whose tables are remade in the quick tests
REPEATED = re.compile(r"-[2-9]$")  # folders of runs that repeat another one


@pytest.fixture(scope="module")
def remake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("remake", RESULTS / "remake.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(
            path,
            id=str(path.relative_to(RESULTS)),
            marks=[pytest.mark.slow] if path.stat().st_size > QUICK_BYTES or REPEATED.search(path.parent.name) else [],
        )
        for path in ARCHIVES
    ],
)
def test_tables_are_what_their_records_make(remake, archive) -> None:
    """If the format of a table changed: python results/remake.py."""
    assert archive.name == remake.ARCHIVE
    assert archive.stat().st_size < MOST_BYTES
    found = list(remake.remade(archive))
    assert {path.suffix for path, _ in found} >= {".md", ".csv"}
    tables = {path for path in archive.parent.rglob("*") if path.suffix in (".md", ".csv", ".json")}
    assert {path for path, _ in found} == tables
    for path, text in found:
        assert remake.is_same(path.read_text(), text), f"{path} is not what its records make"


def test_an_edited_number_is_found(remake, tmp_path, monkeypatch, capsys) -> None:
    source = ARCHIVES[0].parent
    shutil.copytree(source, tmp_path / "copy")
    monkeypatch.setattr(remake, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["remake.py", "--check"])
    assert remake.main() == 0
    assert "are those of their records" in capsys.readouterr().out
    table = next((tmp_path / "copy").glob("*.csv"))
    before = table.read_text()
    digit = re.search(r"\.\d{0,3}(\d)", before)
    assert digit is not None
    table.write_text(before[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + before[digit.end(1) :])
    assert remake.main() == 1
    assert capsys.readouterr().out == f"copy/{table.name} differs\n"
    monkeypatch.setattr("sys.argv", ["remake.py"])
    assert remake.main() == 0
    assert table.read_text() == before


def test_the_readme_names_tables_with_records() -> None:
    text = (RESULTS / "README.md").read_text()
    assert ARCHIVES
    for archive in ARCHIVES:
        assert f"`{archive.parent.relative_to(RESULTS)}/" in text
