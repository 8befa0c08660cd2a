"""The commands that judge what others measured: compare and gate. They read records and load no model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import fresh_folder, show

_RUN = "Folder of sweep, bench, eval or check, a part of one, or OUT.jsonl of generate."


def compare(
    before: Annotated[Path, Argument(metavar="A", help=_RUN)],
    after: Annotated[Path, Argument(metavar="B", help="The same of the run to be held against it.")],
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for summary.md, summary.csv, compare.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what changed from run A to run B, and whether the numbers show a difference.

    specbatch compare out/before out/after

    specbatch compare out/sweep/v1 out/sweep/v2

    specbatch compare out/eval-before out/eval-after --json

    Every metric has a 95% interval: over repeats where both runs have some, else over the prompts, which pair; answers
    pair by question. What got worse is marked (regression); an interval with zero in it shows no difference. Times
    are judged only where both runs took turns: in a sweep with --repeats 3, or in A/1 B/1 A/2 B/2 for two versions.

    Runs of different models, prompts or lengths are refused, with what differs.
    """
    import json

    from specbatch.atomic_file import write_atomic
    from specbatch.sweeps.compare import compare as run

    with nullcontext() if output is None else fresh_folder(output, "compare") as folder:
        result = run(before, after)
        if folder is not None:
            write_atomic(folder / "summary.md", result.markdown())
            write_atomic(folder / "summary.csv", result.csv())
            write_atomic(folder / "compare.json", json.dumps(result.as_dict(), indent=2) + "\n")
    show(result.markdown(), result.as_dict(), as_json=as_json)


def gate(
    run: Annotated[Path, Argument(metavar="RUN", help=_RUN)],
    policy: Annotated[Path, Option(metavar="FILE.toml", help="The rules: tables \\[accuracy] and \\[bounds].")],
    baseline: Annotated[
        Path | None, Option(metavar="RUN", help="The run that rules compare with; of the same model and prompts.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for summary.md, junit.xml, gate.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Decide by the rules of a policy whether a run may ship.

    specbatch gate out/eval --policy gate.toml --baseline results/eval

    specbatch gate out/sweep/v2 --policy gate.toml --output gate

    Accuracy is held against the baseline's answers question by question (exact McNemar test), and the smallest drop
    that could have been found is shown. docs/ci-gate.md has all rules, and a workflow for GitHub Actions.

    Exit status 0 if every check passed, 1 if one failed, 2 if no verdict could be made.
    """
    from specbatch.evals.gate.gate import run_gate
    from specbatch.evals.gate.report import markdown, save

    with nullcontext() if output is None else fresh_folder(output, "gate") as folder:
        result = run_gate(policy, run, baseline)
        if folder is not None:
            save(result, folder)
    show(markdown(result), result.as_dict(), as_json=as_json)
    if not result.passed:
        raise typer.Exit(1)
