"""Several tasks and groups in one run: the model is loaded once, and each name is an evaluation of its own.

    folder/NAME/                       the results of one name, as of any evaluation
    folder/summary.md, summary.csv     the scores of all

As in lm-eval's simple_evaluate, all tasks are loaded after one seeding, and a task that is in two of them is refused.
Tasks may differ in type: those that score given texts do so with the target alone, beside others that draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbatch.errors import listed, refuse
from specbatch.evals.finished import PARTIAL
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.run import PreparedEval, open_folder, prepare, prepare_each
from specbatch.files.atomic_file import write_atomic
from specbatch.records.markdown import markdown_table
from specbatch.records.store import RECORD
from specbatch.records.sweep_plan import folder_name


@dataclass(frozen=True)
class SeveralReports:
    """The reports of a run by the name of the task or group."""

    reports: dict[str, EvalReport]

    def table(self) -> str:
        """Markdown: the scores of all, and below them the speed of each and what it was measured on."""
        scores = [row for report in self.reports.values() for row in report.score_cells()]
        parts = [f"## {name}\n\n{report.details()}" for name, report in self.reports.items()]
        return "\n\n".join([markdown_table(scores), *parts] if scores else parts)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"tasks": {name: report.as_dict() for name, report in self.reports.items()}}

    def save(self, folder: Path) -> None:
        """Write the table as Markdown and CSV."""
        import pandas

        rows = [row for report in self.reports.values() for row in report.flat()]
        write_atomic(folder / "summary.md", self.table() + "\n")
        write_atomic(folder / "summary.csv", pandas.DataFrame(rows).to_csv(index=False))


def refuse_others(folder: Path, names: Sequence[str], file: str) -> None:
    """Refuse the folder of several tasks if it also has results, with such a file, of tasks that are not named."""
    found = {path.parent for path in folder.glob(f"*/{file}")}
    if others := sorted(path.name for path in found - {folder_of(folder, name) for name in names}):
        works = f"has results of {listed(others)} as well, which its table would lose; name all tasks, or a new folder"
        raise refuse("output", str(folder), works)


def prepare_several(options: EvalOptions) -> dict[str, PreparedEval]:
    """Load all tasks. By the name of the task, in the order in which they run."""
    names, output = options.names, options.output
    if len(names) == 1:
        ready = prepare(options)
        return {ready.task.name: ready}
    folders = [None if output is None else folder_of(output, name) for name in names]
    if output is not None:
        if has_results(output, []):
            raise refuse("output", str(output), "has the results of one task; name a new folder for several")
        refuse_others(output, names, RECORD)
        if len({*folders}) < len(folders):
            raise refuse("task", options.task, "has two tasks whose folders have the same name; evaluate one by itself")
    each = [
        # Finished tasks are kept: `overwrite` starts those over that were interrupted.
        replace(options, task=name, output=own, overwrite=options.overwrite and _is_interrupted(own))
        for name, own in zip(names, folders, strict=True)
    ]
    return {ready.task.name: ready for ready in prepare_each(each)}


@contextmanager
def folders_of(every: Iterable[PreparedEval]) -> Iterator[None]:
    """Create the folders of several tasks, and at the end remove those without results. An interruption reports what
    is kept in their parent."""
    folders = [ready.options.output for ready in every if ready.options.output is not None]
    try:
        for folder in folders:
            open_folder(folder)
        yield
    except KeyboardInterrupt:
        kept = [folder for folder in folders if any((folder / name).exists() for name in (PARTIAL, RECORD))]
        if len(folders) == 1 or not kept:
            raise
        reason = f"kept the finished answers of {len(kept)} of {len(folders)} tasks in {folders[0].parent}"
        raise KeyboardInterrupt(f"{reason}; the same command with this --out continues") from None
    finally:
        for folder in folders if len(folders) > 1 else []:
            with suppress(OSError):  # it has results
                folder.rmdir()


def has_results(folder: Path, names: Sequence[str]) -> bool:
    """Whether `folder` has results of a run of these tasks, which may be interrupted."""
    folders = [folder, *(folder_of(folder, name) for name in names)] if len(names) > 1 else [folder]
    return any((own / name).exists() for own in folders for name in (PARTIAL, RECORD))


def _is_interrupted(folder: Path | None) -> bool:
    return folder is not None and (folder / PARTIAL).exists()


def folder_of(output: Path, name: str) -> Path:
    """Of the results of one of several tasks."""
    return output / folder_name(Path(name).stem if name.endswith((".yaml", ".yml")) else name)
