"""`specbatch generate`: runs the prompts of a file or data set."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Exit, Option

from specbatch.cli.options import ChatTemplate, Concurrency, EngineOptions, Json, options_of, takes_engine
from specbatch.cli.output import open_engine, say, show
from specbatch.core.request import SamplingParams
from specbatch.progress import progress


@takes_engine(sampling=options_of(SamplingParams))
def generate(
    *,
    source: Annotated[
        str,
        Argument(
            metavar="IN",
            help="JSONL; a .parquet, .arrow, .csv, .tsv or .json file; a folder of save_to_disk; or "
            "hf:OWNER/NAME\\[@REVISION]\\[:CONFIG] for a data set of the hub.",
        ),
    ],
    engine: EngineOptions,
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            metavar="OUT",
            help="FILE.jsonl, FILE.parquet, or a folder for load_from_disk. Written when all prompts are finished.",
        ),
    ],
    split: Annotated[str | None, Option(help="Split of a data set: test, or for the hub also train[:100].")] = None,
    column: Annotated[
        str | None,
        Option(
            help="Key or column of the prompt, which is text, chat messages or token ids. Default: the one of prompt, "
            "prompt_token_ids, question and messages that is present."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, Option("--skip-bad", help="Skip and report malformed lines instead of stopping with an error.")
    ] = False,
    max_failures: Annotated[
        int, Option(min=0, help="Exit status 1 if more prompts than this fail while they run.")
    ] = 0,
    sampling: dict[str, Any],
    stop: Annotated[
        list[str] | None, Option(help="Stop string, not included in the answer; can be given several times.")
    ] = None,
    chat_template: ChatTemplate = True,
    concurrency: Concurrency = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing output.")] = False,
    as_json: Json = False,
) -> None:
    """Run prompts from a file or data set. After an interruption the same command continues.

    specbatch generate prompts.jsonl -o answers.jsonl --max-new-tokens 256 --spec v2

    specbatch generate prompts.jsonl -o answers.jsonl --skip-bad

    specbatch generate hf:openai/gsm8k:main --split test -o answers.parquet

    specbatch generate chats.parquet --column conversation -o answers/

    specbatch generate mails.csv --column body -o answers.jsonl

    specbatch generate saved/ --split train -o answers/

    Each line of JSONL is an object with prompt, prompt_token_ids, question or messages, and optionally an id:

    {"prompt": "The capital of France is", "id": 1}

    {"messages": [{"role": "user", "content": "Name a river."}]}

    The output has the order of the input; `index` is the position of the line or row in the input, from 0. A prompt
    that fails while it runs, because its logits are not finite, has a row with an `error` in place of an answer.
    """
    from specbatch.atomic_file import write_atomic
    from specbatch.jobs.batch_job import BatchJob, summary

    params = SamplingParams(stop=tuple(stop or ()), **sampling)
    config = engine.config(concurrency=concurrency)
    job = BatchJob.open(
        source,
        output,
        config,
        params,
        chat_template=chat_template,
        overwrite=overwrite,
        split=split,
        column=column,
        skip_bad=skip_bad,
        log=say,
    )
    if job.finished:
        say(f"continuing: {len(job.finished)} of {len(job.prompts)} are finished")
    with open_engine(config) as running:
        with progress("generate", len(job.finished)) as report:
            rows = job.run(running, concurrency=concurrency, report=report)
        record = running.record(concurrency=concurrency, workload={"command": "generate", **job.kept.header})
    say(f"generate: {summary(record.metrics, drafts=config.speculation.drafted > 0)}")
    record.workload["skipped"] = len(job.skipped)
    write_atomic(job.record_path, record.summary())
    left_out = f", {len(job.skipped)} malformed lines skipped" if job.skipped else ""
    left_out += f", {job.failed} of them failed" if job.failed else ""
    result = {
        "output": str(job.output),
        "rows": len(rows),
        "failed": job.failed,
        "skipped": len(job.skipped),
        "record": str(job.record_path),
        "metrics": record.metrics,
    }
    count = f"{len(rows)} row{'s' if len(rows) != 1 else ''}"
    text = f"{count} in {job.output}{left_out}; configuration and metrics: {job.record_path}"
    show(text, result, as_json=as_json)
    if job.failed > max_failures:
        raise Exit(1)
