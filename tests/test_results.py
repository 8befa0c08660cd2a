"""Published tables are what the records beside them make."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from specbatch.records.run_record import RunRecord

RESULTS = Path(__file__).parents[1] / "results"
ABOUT = "about.md"
ARCHIVES = sorted(RESULTS.rglob("*.tar.xz"))
MOST_BYTES = 3_000_000  # of one archive: 60 bytes per request
QUICK_BYTES = 20_000  # of one whose tables are remade in the quick tests
REPEATED = re.compile(r"-[2-9]$")  # folders of runs that repeat another one


@pytest.fixture(scope="module")
def remake() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RESULTS)
        return importlib.import_module("remake")


@pytest.fixture(scope="module")
def pages(remake) -> dict[Path, str]:
    """The text of every page by its path."""
    return remake.pages(RESULTS)


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
    tables = {path for path in archive.parent.rglob("*") if path.suffix in (".md", ".csv", ".json", ".svg")}
    assert {path for path, _ in found} == tables - {archive.with_name(name) for name in (remake.PAGE, ABOUT)}
    for path, text in found:
        assert remake.is_same(path.read_text(), text), f"{path} is not what its records make"


def test_an_edited_number_is_found(remake, tmp_path, monkeypatch, capsys) -> None:
    source = ARCHIVES[0].parent
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / ABOUT).write_text("# Copies\n\nOf one table.\n\n## How to read them\n\nAs the others.\n")
    monkeypatch.setattr(remake, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["remake.py"])
    assert remake.main() == 0  # the pages of the copy
    assert "copy/README.md is made again" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["remake.py", "--check"])
    assert remake.main() == 0
    assert "are those of their records" in capsys.readouterr().out
    table = next((tmp_path / "copy").glob("*.csv"))
    edited = {table: re.compile(r"\.\d{0,3}(\d)"), tmp_path / "copy" / remake.PAGE: re.compile(r"torch \d\.1(\d)")}
    before = {path: path.read_text() for path in edited}
    for path, number in edited.items():
        digit = number.search(before[path])
        assert digit is not None
        path.write_text(before[path][: digit.start(1)] + str((int(digit[1]) + 1) % 10) + before[path][digit.end(1) :])
    assert remake.main() == 1
    assert capsys.readouterr().out == f"copy/{table.name} differs\ncopy/README.md differs\n"
    monkeypatch.setattr("sys.argv", ["remake.py"])
    assert remake.main() == 0
    assert all(remake.is_same(before[path], path.read_text()) for path in edited)


def test_pages_are_what_records_and_texts_make(remake, pages) -> None:
    """If a text or the format of a page changed: python results/remake.py."""
    assert {archive.with_name(remake.PAGE) for archive in ARCHIVES} <= set(pages)
    assert set(pages) == set(RESULTS.rglob(remake.PAGE))
    for page, text in pages.items():
        assert page.read_text() == text, f"{page} is not what records and about.md make"


def test_every_page_and_file_is_linked(pages) -> None:
    """Pages lead to all others, and those without records name every file of their folder."""
    linked = {
        (page.parent / target).resolve()
        for page, text in pages.items()
        for target in re.findall(r"\]\((?!https://)([^)#\s]+)", text)
    }
    assert {page.resolve() for page in pages} <= linked
    kinds = (".md", ".csv", ".jsonl", ".svg")
    folders = {folder for page in pages for folder in (page.parent, page.parent / "plots") if folder.exists()}
    files = {path for folder in folders for path in folder.iterdir() if path.suffix in kinds}
    texts = {page.with_name(ABOUT) for page in pages}
    assert files - texts - linked == set()


def test_pages_have_the_plot_and_the_short_tables(tmp_path: Path, pages) -> None:
    module = importlib.import_module("pages")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots/context.svg").write_text("<svg/>")
    table = f"* model: toy\n\nAccept length by input tokens:\n\n| 512 |\n\n{module.EVERY_POINT}\n\n| 1 |\n\n"
    (tmp_path / "summary.md").write_text(f"{table}By turn, accept length:\n\n| 7 |\n\n| turn |\n")
    found = "\n".join(module._short_tables(tmp_path))
    assert found == (
        "![Accept length and speedup by input tokens](plots/context.svg)\n\n"
        "Accept length by input tokens:\n\n| 512 |\n\nBy turn, accept length:\n\n| 7 |\n"
    )


def test_plots_by_context_in_the_readme_are_remade(remake) -> None:
    """Their records lie beside them, so that `results/remake.py` makes them again."""
    readme = (RESULTS.parent / "README.md").read_text()
    plots = [RESULTS.parent / path for path in re.findall(r"\]\((results/\S+/plots/\S+\.svg)\)", readme)]
    assert plots
    for path in plots:
        assert path in {table for table, _ in remake.remade(path.parents[1] / remake.ARCHIVE)}


def test_commands_name_no_folders_outside_of_the_checkout(remake) -> None:
    command = ["specbatch", "sweep", "--data", "/data/gsm8k.jsonl", "--out", "/data/out", "--configs", "a/b.toml"]
    record = RunRecord({}, {}, {}, {}, [], provenance={"command": command})
    shown = importlib.import_module("pages").shown_command(record)
    assert shown == "specbatch sweep --data gsm8k.jsonl --configs a/b.toml"


def test_offline_tables_are_what_their_lines_make(monkeypatch) -> None:
    """If the format changed: python docs/offline/table.py results/h200/offline/points.jsonl, into summary.md.
    The points are those of the scripts."""
    monkeypatch.syspath_prepend(RESULTS.parent / "docs/offline")
    points, table = importlib.import_module("points"), importlib.import_module("table")
    for path in RESULTS.glob("*/offline/points.jsonl"):
        text = path.read_text()
        assert path.with_name("summary.md").read_text() == table.tables(text)
        for line in map(json.loads, text.splitlines()):
            point = points.POINTS[line["point"]]
            sizes = (point.requests, point.shared + point.tokens_in, point.tokens_out)
            assert (line["requests"], line["tokens_in"], line["tokens_out"]) == sizes
            assert line["output_tokens"] == point.requests * point.tokens_out
