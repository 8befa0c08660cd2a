"""`specbatch bench`: measures the engine against the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from specbatch.cli.options import SAMPLING_OPTIONS, EngineOptions, Json, Wide, takes_engine
from specbatch.cli.output import fresh_folder, results, say, show
from specbatch.cli.values import is_given, names, whole_numbers
from specbatch.errors import refuse
from specbatch.progress.bars import progress

# Options of the engine that each point of `bench` sets itself.
_WITHOUT = ("data_parallel", "spec", "prefill_graph", "max_running", "max_model_len", "kv_pages", "prefix_cache")


@takes_engine(without=_WITHOUT, defaults={"algorithm": "standalone with --draft, else none"}, sampling=SAMPLING_OPTIONS)
def bench(
    context: typer.Context,
    engine: EngineOptions,
    sampling: dict[str, Any],
    sections: Annotated[str, Option(help="Sections to run: machine, decode, closed, ttft, verify.")] = (
        "machine,decode,closed,ttft,verify"
    ),
    configs: Annotated[
        str | None,
        Option(
            help="Configurations for sections closed, ttft and decode: v1, v2, v2+piecewise; with speculation also "
            "baseline. Section verify always runs v2. Default: all that the device supports."
        ),
    ] = None,
    batch: Annotated[str, Option(help="Batch sizes of a decode step.")] = "1,32,128",
    verify_batch: Annotated[
        str, Option(help="Batch sizes of the verify step (15 draft tokens + root per request).")
    ] = "1,32",
    decode_tokens: Annotated[int, Option(help="Context length at which decode and verify steps are measured.")] = 512,
    new_tokens: Annotated[int, Option(help="Tokens that a decode or verify step is averaged over.")] = 288,
    concurrency: Annotated[str, Option(help="Maximum numbers of requests in flight in a closed loop.")] = "1,8,32,128",
    input_len: Annotated[int, Option(help="Prompt tokens in a closed loop.")] = 1024,
    output_len: Annotated[int, Option(help="New tokens in a closed loop.")] = 256,
    ttft_tokens: Annotated[str, Option(help="Prompt tokens of a single request.")] = "128,1024,8192",
    repeats: Annotated[int, Option(help="Rounds over the configurations, interleaved: A B C C B A.")] = 3,
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
    from specbatch.sweeps.bench.sections import KINDS, BenchOptions
    from specbatch.sweeps.bench.tables import joined, load_sections, markdown, rows_of
    from specbatch.sweeps.report.tables import as_json as json_rows

    options = BenchOptions(
        sections=names(sections),
        configs=None if configs is None else names(configs),
        batch=whole_numbers("batch", batch),
        verify_batch=whole_numbers("verify_batch", verify_batch),
        decode_tokens=decode_tokens,
        new_tokens=new_tokens,
        concurrency=whole_numbers("concurrency", concurrency),
        input_len=input_len,
        output_len=output_len,
        ttft_tokens=whole_numbers("ttft_tokens", ttft_tokens),
        repeats=repeats,
        sampling=sampling,
        given=frozenset(
            name
            for name in (*(name for kind in KINDS.values() for name in kind.lengths), "sections")
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
