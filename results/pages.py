"""Pages of results: a README.md per folder, made from its records, its files and the text in its `about.md`.

A folder has a page if it has records (`records.tar.xz`) or an `about.md`. What records do not know, such as the use of
other GPUs of the machine, stands in `about.md`. Its first line may be the title of the page.
"""

from __future__ import annotations

import json
import shlex
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from specbatch.records.run_record import RunRecord
from specbatch.records.store import RECORD
from specbatch.sweeps.report.parts import EVERY_POINT

ARCHIVE = "records.tar.xz"
PAGE = "README.md"
ABOUT = "about.md"
NOTICE = "<!-- Made by `python results/remake.py` from the records and from about.md. Edit about.md instead. -->"
LINKED = (".md", ".csv", ".json", ".jsonl", ".toml", ".svg", ".xz")
CONTEXT = "plots/context.svg"
VERSIONS = ("python", "torch", "triton", "transformers", "tokenizers", "lm_eval", "datasets")


@dataclass(frozen=True)
class Run:
    """What the records in an archive say about how they were measured."""

    model: str
    dtype: str
    hardware: str
    versions: str
    date: str
    revision: str
    commands: tuple[str, ...]

    @classmethod
    def load(cls, archive: Path) -> Self:
        records = sorted(_records(archive), key=lambda record: record.created)
        first = next(record for record in records if "tensor_parallel" in record.config)  # no server of another engine
        versions = {name: number for record in records for name, number in record.versions.items()}
        is_random = first.config.get("load_format") == "dummy"
        days = sorted({record.created[:10] for record in records})
        return cls(
            model=f"`{_name(first.config['model'])}`{', random weights' * is_random}",
            dtype=first.caps["dtype"],
            hardware=first.processor,
            versions=", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions),
            date=" to ".join(sorted({days[0], days[-1]})),
            revision=", ".join(dict.fromkeys(_revision(record) for record in records)),
            commands=tuple(dict.fromkeys(shown_command(record) for record in records)),
        )

    @property
    def kind(self) -> str:
        """The command and, of an evaluation, its task."""
        words = self.commands[0].split()[1:3]
        return " ".join(words if words[:1] == ["eval"] else words[:1])

    def section(self, folder: Path) -> Iterator[str]:
        """Markdown of the page in `folder`."""
        yield from _short_tables(folder)
        yield from ("## How it was measured", "", "| | |", "|---|---|")
        yield f"| model | {self.model}, {self.dtype} |"
        yield f"| hardware | {self.hardware} |"
        if workloads := _workloads(folder / "summary.md"):
            yield f"| workload | {'; '.join(workloads)} |"
        yield f"| versions | {self.versions} |"
        yield f"| date, revision in the records | {self.date}, {self.revision} |"
        yield f"| files | {', '.join(_files(folder))} |"
        yield from ("", "```sh", *self.commands, "```")


@dataclass(frozen=True)
class Folder:
    """A folder of results with a page."""

    root: Path
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def run(self) -> Run | None:
        archive = self.path / ARCHIVE
        return Run.load(archive) if archive.exists() else None

    @property
    def text(self) -> tuple[str, str]:
        """The title and the text of `about.md`."""
        about = self.path / ABOUT
        text = about.read_text(encoding="utf-8") if about.exists() else ""
        if not text.startswith("# "):
            return self.name, text.strip()
        title, _, rest = text.removeprefix("# ").partition("\n")
        return title, rest.strip()


def shown_command(record: RunRecord) -> str:
    """The command without its output folder; files outside of the checkout are named without their folders."""
    words = record.provenance.get("command", [])
    outputs = {n for n, word in enumerate(words) if word in ("--out", "--output")}
    return shlex.join(_name(word) for n, word in enumerate(words) if not {n, n - 1} & outputs)


def pages(root: Path) -> dict[Path, str]:
    """The text of every page below `root`, by its path. `root` has an `about.md`."""
    marks = {path.parent for name in (ARCHIVE, ABOUT) for path in root.rglob(name)}
    folders = [Folder(root, path) for path in sorted(marks)]
    runs = {folder: folder.run for folder in folders}
    groups = {folder.path: folder for folder in folders if runs[folder] is None}
    above = {folder: next((groups[path] for path in folder.path.parents if path in groups), None) for folder in folders}
    return {folder.path / PAGE: _page(folder, runs, above) for folder in folders}


def _page(folder: Folder, runs: dict[Folder, Run | None], above: dict[Folder, Folder | None]) -> str:
    title, text = folder.text
    lines = [NOTICE, "", f"# {title}", ""]
    if (parent := above[folder]) is None:
        first, _, rest = text.partition("\n## ")
        return "\n".join([*lines, first, *_index(runs, above), "", f"## {rest}", ""])
    if text:
        lines += [text, ""]
    if (run := runs[folder]) is not None:
        lines += [*run.section(folder.path), ""]
    if below := [other for other in runs if above[other] == folder]:
        lines += [*_children(folder, {other: runs[other] for other in below}), ""]
    up = "/".join([".."] * len(folder.path.relative_to(parent.path).parts))
    return "\n".join([*lines, f"[All of {parent.path.name}, with remarks]({up}/{PAGE})", ""])


def _children(folder: Folder, runs: dict[Folder, Run | None]) -> Iterator[str]:
    """A table of the pages below."""
    yield from ("## Folders", "", "| folder | what | model | hardware | date |", "|---|---|---|---|---|")
    for other, run in runs.items():
        name = other.path.relative_to(folder.path).as_posix()
        cells = (other.text[0], "", "", "") if run is None else (run.kind, run.model, run.hardware, run.date)
        yield f"| {' | '.join((f'[{name}]({name}/{PAGE})', *cells))} |"


def _index(runs: dict[Folder, Run | None], above: dict[Folder, Folder | None]) -> Iterator[str]:
    """A table of the pages about several folders, with the number of those that have records."""
    yield from ("## Pages", "", "| folder | what it has | folders with records |", "|---|---|---|")
    counts = Counter(above[folder] for folder, run in runs.items() if run is not None)
    for folder, run in runs.items():
        if run is None and above[folder] is not None:
            yield f"| [{folder.name}]({folder.name}/{PAGE}) | {folder.text[0]} | {counts[folder] or ''} |"


def _records(archive: Path) -> Iterator[RunRecord]:
    with tarfile.open(archive, "r|xz") as file:
        for member in file:
            if Path(member.name).name == RECORD and (data := file.extractfile(member)) is not None:
                yield RunRecord(requests=[], **json.load(data))


def _revision(record: RunRecord) -> str:
    if (git := record.provenance.get("git")) is None:
        return "none"
    return f"{git['revision'][:8]}{' with changes' if git['dirty'] else ''}"


def _name(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def _workloads(table: Path) -> dict[str, None]:
    """What a sweep or the sections of a bench ran; empty for an evaluation, whose command names the task."""
    mark = "* workload: "
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    return dict.fromkeys(line.removeprefix(mark) for line in lines if line.startswith(mark))


def _short_tables(folder: Path) -> Iterator[str]:
    """Plot and first tables of sweeps that differ in one thing, up to the tables of every point; those by turn."""
    if (folder / CONTEXT).exists():
        yield from (f"![Accept length and speedup by input tokens]({CONTEXT})", "")
    table = folder / "summary.md"
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    if EVERY_POINT in text:
        first = text.index("\n\n") + 2  # after the heading
        yield text[first : text.index(EVERY_POINT) - 1]
    for title, rows in pairwise(text.split("\n\n")):
        if title.startswith("By turn, "):
            yield from (title, "", rows, "")


def _files(folder: Path) -> Iterable[str]:
    paths = sorted([*folder.iterdir(), *folder.glob("plots/*.svg")])
    kept = (path for path in paths if path.suffix in LINKED and path.name not in (PAGE, ABOUT))
    return (f"[{path.name}]({path.relative_to(folder).as_posix()})" for path in kept)
