"""`specbatch acceptance`: acceptance by draft position of runs, as a table and as a file for --simulate-accept, and of
the same drafter in several engines with its differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import RUN_HELP, show
from specbatch.errors import refuse


def acceptance(
    runs: Annotated[
        list[Path], Argument(metavar="RUN...", help=f"{RUN_HELP} Several of one engine are counted together.")
    ],
    output: Annotated[
        Path | None,
        Option("--output", "--out", help="File for --simulate-accept: .json, or .yaml as a golden acceptance curve."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how often each draft position was accepted, and the accept length that fewer drafts would have.

    specbatch acceptance out/sweep-20260102-030405/v2

    specbatch acceptance out/a out/b --output curve.yaml

    specbatch acceptance out/specbatch out/vllm

    specbatch sweep --model qwen3-8b --load-format dummy --algorithm eagle3 --draft dummy --simulate-accept curve.yaml

    Draft j counts where all drafts before it were accepted. Runs without drafts are ignored. Of models that reason, a
    second table has tokens and acceptance of reasoning and answer apart.

    Runs of this engine and of servers, or of several servers, are compared: the same drafter should be accepted as
    often everywhere. The table has the differences with their intervals, and what may have made them
    (docs/any-engine.md).
    """
    from specbatch.jobs.output_files import read_output
    from specbatch.records.reasoning import parts_of, parts_table, reasons
    from specbatch.sweeps.report.acceptance_comparison import compare_engines
    from specbatch.sweeps.report.acceptance_curve import check_suffix, curve_of_records, read_all
    from specbatch.sweeps.report.prompt_acceptance import sides_of

    if output is not None:
        check_suffix(output)
    found = read_all(runs, lambda output: [])
    engines = [side.label for side in sides_of(found)]
    if len(engines) > 1:
        if output is not None:
            raise refuse("output", str(output), f"takes runs of one engine; these are of {', '.join(engines)}")
        comparison = compare_engines(read_all(runs, read_output))
        show(comparison.markdown(), comparison.as_dict(), as_json=as_json)
        return
    curve = curve_of_records(found)
    if output is not None:
        curve.save(output)
    drafting = [record for _, record in found if record.drafts]
    parts = {"parts": parts_of(drafting)} if reasons(drafting) else {}
    text = "\n\n".join(filter(None, [curve.markdown(), parts_table({(): drafting})]))
    show(text, curve.as_dict() | parts, as_json=as_json)
