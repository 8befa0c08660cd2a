"""`specbatch bench`: measures the engine against the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from specbatch.cli.options import SAMPLING_OPTIONS, EngineOptions, Json, Wide, is_given, options_of, takes_engine
from specbatch.cli.output import fresh_folder, results, say, show
from specbatch.errors import refuse
from specbatch.progress.bars import progress
from specbatch.sweeps.bench.options import LENGTHS, BenchOptions

# Options of the engine that each point of `bench` sets itself.
_WITHOUT = ("data_parallel", "spec", "prefill_graph", "max_running", "max_model_len", "kv_pages", "prefix_cache")


@takes_engine(
    without=_WITHOUT,
    defaults={"algorithm": "standalone with --draft, else none"},
    sampling=SAMPLING_OPTIONS,
    settings=options_of(BenchOptions),
)
def bench(
    context: typer.Context,
    engine: EngineOptions,
    sampling: dict[str, Any],
    settings: dict[str, Any],
    peers: Annotated[
        str | None, Option(metavar="FILE.csv", help="CSV with results of other engines, to show next to these.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "--out",
            help="New folder for the results, or that of an interrupted bench to continue. Default: out/bench-TIME.",
        ),
    ] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Benchmark the engine: decode and verify steps, closed loops, time to first token, and the device's limits.

    specbatch bench --model qwen3-8b --load-format dummy

    specbatch bench --model toy --load-format dummy --batch 1,4 --sections decode --repeats 1

    specbatch bench --model qwen3-8b --load-format dummy --algorithm eagle3 --draft dummy --simulate-accept-length 2.4

    With --algorithm or --draft, v1, v2 and v2+piecewise speculate and are compared with a baseline; section verify is
    skipped.

    Default sizes that are too long for the model are skipped; sizes you give that are too long are an error.

    Each section is a sweep in a folder of its own, which report and compare read. A step time is the mean of the
    iterations at full batch. To continue an interrupted bench, run the same command with its folder as --out.

    Exit status 1 if a point failed; a note shows the reason, and the same command runs it again.
    """
    from specbatch.records.sweep_plan import PLAN
    from specbatch.sweeps.bench.bench import run_bench
    from specbatch.sweeps.bench.peers import read_peers
    from specbatch.sweeps.bench.tables import joined, load_sections, markdown, rows_of
    from specbatch.sweeps.report.tables import as_json as json_rows

    options = BenchOptions(
        **settings,
        sampling=sampling,
        given=frozenset(
            name
            for name in ("sections", *(name for names in LENGTHS.values() for name in names))
            if is_given(context, name)
        ),
    )
    if peers == "":
        raise refuse("peers", peers, "name a CSV file")
    beside = read_peers(Path(peers)) if peers is not None else ""
    base = engine.config(compares=True, prefix_cache=False)
    resumes = "*" if output is not None and any(output.glob(f"*/{PLAN}")) else None
    with fresh_folder(output, "bench", resumes=resumes) as folder, progress("bench", "requests") as report:
        run_bench(base, options, folder, peers=beside, log=say, report=report)
    records = load_sections(folder)
    rows = rows_of(records)
    text, every = markdown(folder, records, rows, brief=not wide), json_rows(joined(rows.values()))
    show(
        f"{text}\n{results(folder, wide=wide)}",
        {"output": str(folder), "rows": every},
        as_json=as_json,
        kept=str(folder),
    )
    if any(record.error for own in records.values() for record in own):
        raise typer.Exit(1)
