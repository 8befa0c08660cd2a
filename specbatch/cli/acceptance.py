"""`specbatch acceptance`: acceptance by draft position of runs, as a table and as a file for --simulate-accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import RUN_HELP, show


def acceptance(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help=f"{RUN_HELP} Several are counted together.")],
    output: Annotated[
        Path | None,
        Option("--output", "--out", help="File for --simulate-accept: .json, or .yaml as a golden acceptance curve."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how often each draft position was accepted, and the accept length that fewer drafts would have.

    specbatch acceptance out/sweep-20260102-030405/v2

    specbatch acceptance out/a out/b --output curve.yaml

    specbatch sweep --model qwen3-8b --load-format dummy --algorithm eagle3 --draft dummy --simulate-accept curve.yaml

    Draft j counts where all drafts before it were accepted. Runs without drafts are ignored.
    """
    from specbatch.sweeps.report.acceptance_curve import check_suffix, curve_of

    if output is not None:
        check_suffix(output)
    curve = curve_of(runs)
    if output is not None:
        curve.save(output)
    show(curve.markdown(), curve.as_dict(), as_json=as_json)
