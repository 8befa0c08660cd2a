"""`specbatch gate`: checks a run against a policy. Reads records and loads no model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import RUN_HELP, derived_folder, show


def gate(
    run: Annotated[Path, Argument(metavar="RUN", help=RUN_HELP)],
    policy: Annotated[
        Path, Option(metavar="FILE.toml", help="The rules: tables \\[accuracy], \\[answers] and \\[bounds].")
    ],
    baseline: Annotated[
        Path | None, Option(metavar="RUN", help="The run to compare with; it must have the same model and prompts.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for summary.md, junit.xml, gate.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run against the rules of a policy.

    specbatch gate out/eval --policy gate.toml --baseline results/eval

    specbatch gate out/sweep/v2 --policy gate.toml --output gate

    Accuracy is compared with the baseline question by question (exact McNemar test), together with the smallest drop
    that the number of questions could detect. docs/ci-gate.md describes all rules and a workflow for GitHub Actions.

    Exit status 0 if every check passed, 1 if one failed, 2 if there is no verdict: an error, or a check that the runs
    are too few or too noisy to decide.
    """
    from specbatch.evals.gate.gate import run_gate
    from specbatch.evals.gate.report import markdown, save

    with nullcontext() if output is None else derived_folder(output, "gate") as folder:
        result = run_gate(policy, run, baseline)
        if folder is not None:
            save(result, folder)
    show(markdown(result), result.as_dict(), as_json=as_json, kept="the verdict, as the exit status,")
    if not result.passed:
        raise typer.Exit(result.exit_status)
