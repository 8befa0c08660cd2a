"""Documentation: commands parse, links and files exist, numbers are in results, and examples run on a toy model."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoints import TINY, write_folder
from click import Command, Context
from typer.testing import CliRunner

from specbatch.cli.app import app

ROOT = Path(__file__).parents[1]
TWO_DECIMALS = r"(?<![\d.,])\d+\.\d\d(?!\d)"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "results").rglob("*.md"))]
SMALLER = {"--steps": "2", "--concurrency": "1,2", "--prompts": "2"}
TOY = ["--model", "model", "--device", "cpu"]
SHORT = {
    "sweep": ["--output-len", "4", "--prompts-per-concurrency", "1", "--repeats", "1"],
    "check": ["--max-new-tokens", "4"],
    "train-draft": ["--max-new-tokens", "6"],
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("specbatch ")]


def found(page: Path) -> list[list[str]]:
    """Commands in blocks, in text and in tables."""
    text = page.read_text()
    whole = [words for kind in ("", "sh", "sh run") for block in blocks(page, kind) for words in commands(block)]
    inline = re.findall(r"`(specbatch [a-z-]+(?: [^`]*)?)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return whole + [shlex.split(line)[1:] for line in inline]


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "results").rglob("about.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_parse(page: Path) -> None:
    """Names and values of options are those that the command takes."""
    group = typer.main.get_command(app)
    for words in found(page):
        name, *rest = words
        command: Command = group.commands[name]  # type: ignore[attr-defined]
        if not rest or "[" in " ".join(rest) or name == "lm-eval":  # only its name, a synopsis, or lm-eval's options
            continue
        if hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        assert not hasattr(command, "commands"), f"{page.name}: {shlex.join(words)} names a group"
        # Required options may be missing: a line may be about one option.
        parsed = Context(command, info_name=name, resilient_parsing=True)
        command.parse_args(parsed, rest)
        assert not parsed.args, f"{page.name}: specbatch {shlex.join(words)}"
        options = {option for item in command.params for option in (*item.opts, *item.secondary_opts)}
        assert {word for word in rest if word.startswith("-")} <= options, f"{page.name}: {shlex.join(words)}"


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    """Names are paths from the root, the package or the page. Those under out/ and ci/ are outputs; those "at" a commit
    were removed."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https://)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    named = re.findall(r"`((?!out/|ci/)[\w./-]+/[\w.-]+\.(?:py|md|toml|csv))`(?! at [0-9a-f]{7})", text)
    roots = (ROOT, ROOT / "specbatch", page.parent)
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


def anchors(page: Path) -> set[str]:
    """The headings as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def numbers(text: str) -> set[str]:
    """Numbers of three digits and more, without thousands separators; no versions and no names such as 35B."""
    found = re.findall(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-]|[.,]\d)", text)
    return {number.replace(",", "") for number in found if len(re.sub(r"\D", "", number)) >= 3}


def test_index_of_the_docs_has_every_page() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"]({page.name})" not in text] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 9216


def test_sweep_of_the_readme_is_in_results() -> None:
    """The rows and sentences are those of the table that the section names."""
    section = (ROOT / "README.md").read_text().partition("## Sweep\n")[2].partition("\n## ")[0]
    (named,) = re.findall(r"\]\((results/[^)]*)README.md\)", section)
    table = {re.sub(" +", " ", line) for line in (ROOT / named / "summary.md").read_text().splitlines()}
    shown = [line for line in section.splitlines() if line.startswith(("| ", "Concurrency"))]
    assert len(shown) > 4
    assert [line for line in shown if line not in table] == []


def test_numbers_in_the_readme_are_in_results() -> None:
    """Exact or rounded. So are those of the page of results."""
    text = (ROOT / "README.md").read_text()
    claims = text[: text.index("## Install")] + text[text.index("## Three engines") : text.index("## How it works")]
    claims += (ROOT / "docs" / "results-at-a-glance.md").read_text()
    tables = [path for kind in ("md", "csv") for path in (ROOT / "results").glob(f"*/**/*.{kind}")]
    tables = [path for path in tables if path.name not in ("README.md", "about.md")]
    found = {float(value) for path in tables for value in re.findall(r"\d+(?:\.\d+)?", path.read_text())}
    measured = found | {100 * value for value in found if value < 1}  # scores, in percent
    rounded = {digits: {round(value, digits) for value in measured} for digits in range(4)}
    for number in numbers(claims):
        digits = len(number.partition(".")[2])
        assert float(number) in rounded[digits], number


def test_tables_of_the_page_of_results_are_those_that_their_section_links() -> None:
    docs = ROOT / "docs"
    for section in (docs / "results-at-a-glance.md").read_text().split("\n## ")[1:]:
        linked = [(docs / link).resolve() for link in re.findall(r"\]\((\.\./results/[^)#]+)", section)]
        folders = {path if path.is_dir() else path.parent for path in linked}
        paths = [path for folder in folders for path in folder.glob("*.md")]
        found = {value for path in paths for value in re.findall(r"\d+\.\d\d+", path.read_text())}
        known = {f"{float(value):.2f}" for value in found}
        rows = "\n".join(line for line in section.splitlines() if line.startswith("| "))
        assert set(re.findall(TWO_DECIMALS, rows)) <= known, section.partition("\n")[0]


def test_layers_are_those_of_the_import_contracts() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages, *rooms = [item for item in settings["contracts"] if item["type"] == "layers"]
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| layer |")[2].partition("\n\n")[0]
    rows = [set(re.findall(r"`([a-z_]+)`", row.split("|")[1])) for row in table.splitlines()[2:]]
    assert rows == [set(re.findall(r"[a-z_]+", layer)) for layer in packages["layers"]]
    inside = page.partition("| package |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(inside) == len(rooms)
    for row, contract in zip(inside, rooms, strict=True):
        assert row.split("`")[1].replace("/", ".") == contract["containers"][0].removeprefix("specbatch.")
        named = re.findall(r"`([a-z_]+)(?:/|\.py)?`", row.split("|")[2])
        folders = {name for layer in contract["layers"] for name in re.findall(r"\w+", layer)}
        assert set(named) <= folders
        place = row.split("`")[1]
        parents = [ROOT / place, ROOT / "specbatch" / place]
        assert {name for name in folders if any((parent / name).is_dir() for parent in parents)} <= set(named)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model and the files that the docs use."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", TINY | {"num_hidden_layers": 2, "max_position_embeddings": 2048})
    rows = [{"question": f"{n} and {n}?", "answer": f"so #### {2 * n}"} for n in range(10, 60)]
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shortened(words: list[str]) -> list[str]:
    """The same command on the toy model."""
    name, *rest = words
    short = [SMALLER.get(before, word) for before, word in zip([name, *rest], rest, strict=False)]
    answered = name == "train-draft" and "--answers" in rest  # then there are no answers to generate
    return [name, *short, *(TOY if name in SHORT else []), *([] if answered else SHORT.get(name, []))]


@pytest.mark.slow
def test_own_draft_guide(folder: Path) -> None:
    """docs/own-draft.md from the first command to the last."""
    page = ROOT / "docs" / "own-draft.md"
    (grid,) = blocks(page, "toml")
    (folder / "grid.toml").write_text(grid)
    ran = []
    for block in blocks(page, "sh run"):
        for words in commands(block):
            result = CliRunner().invoke(app, shortened(words))
            assert result.exit_code == 0, f"specbatch {shlex.join(shortened(words))}\n{result.output}"
            ran.append(words[0])
    assert ran == ["train-draft", "train-draft", "check", "sweep", "report", "sweep", "sweep"]
    assert (folder / "out/head/report.html").is_file()
    assert "accept length" in (folder / "out/lengths/summary.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import specbatch

    def config(**settings: Any) -> Any:
        return real(**settings | {"model": "toy", "load_format": "dummy", "device": "cpu"})

    real = specbatch.EngineConfig
    monkeypatch.setattr(specbatch, "EngineConfig", config)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})
        assert capsys.readouterr().out


@pytest.mark.parametrize("script", sorted((ROOT / "findings").glob("*.sh")), ids=lambda path: path.name)
def test_findings_are_listed_and_say_what_was_expected(script: Path) -> None:
    first, *header = [line.removeprefix("# ") for line in script.read_text().splitlines()[1:] if line.startswith("# ")]
    assert f"| [{script.name}]({script.name}) | {first} |" in (ROOT / "findings/README.md").read_text()
    for part in ("Versions:", "Expected:", "Seen:", "Matters:"):
        assert any(line.startswith(part) for line in header), part


def test_the_files_to_read_are_ten_and_short() -> None:
    """docs/reading-the-code.md names each with about its number of lines."""
    text = (ROOT / "docs/reading-the-code.md").read_text()
    listed = re.findall(r"^\| \d+ \| `([\w/.]+)` \| (\d+) \|", text, re.MULTILINE)
    lines = {name: len((ROOT / name).read_text().splitlines()) for name, _ in listed}
    assert len(lines) == 10
    assert all(abs(int(count) - lines[name]) <= 20 for name, count in listed)
    assert sum(lines.values()) <= 1600
