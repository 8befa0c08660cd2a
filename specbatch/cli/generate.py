"""`specbatch generate`: runs the prompts of a file or data set."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Context, Exit, Option

from specbatch.cli.cluster import CLUSTER_OPTIONS, clustered
from specbatch.cli.options import Concurrency, EngineOptions, Json, is_given, options_of, takes_engine
from specbatch.cli.output import open_replicas, say, show
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import counted, reporting
from specbatch.jobs.job_settings import JobSettings, Limits
from specbatch.progress.bars import progress

LARGE = 16 << 20  # bytes of an input that takes a second or more to read, which is reported first
STOPPED = 3  # exit status of a job that a limit ended before it was finished


@takes_engine(
    settings=options_of(JobSettings),
    limits=options_of(Limits),
    sampling=options_of(SamplingParams),
    cluster=CLUSTER_OPTIONS,
)
def generate(
    context: Context,
    *,
    source: Annotated[
        str,
        Argument(
            metavar="IN",
            help="JSONL; an OpenAI batch file; a .parquet, .arrow, .csv, .tsv or .json file; a folder of save_to_disk; "
            "hf:OWNER/NAME\\[@REVISION]\\[:CONFIG] for a data set of the hub; or a file at a URL such as s3://.",
        ),
    ],
    engine: EngineOptions,
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            metavar="OUT",
            help="FILE.jsonl, FILE.parquet, either of them at a URL such as s3://, or a folder for load_from_disk. "
            "Written when all prompts are finished.",
        ),
    ],
    settings: dict[str, Any],
    max_failures: Annotated[
        int, Option(min=0, help="Exit status 1 if more prompts than this fail while they run.")
    ] = 0,
    limits: dict[str, Any],
    sampling: dict[str, Any],
    stop: Annotated[
        list[str] | None, Option(help="Stop string, not included in the answer; can be given several times.")
    ] = None,
    concurrency: Concurrency = None,
    cluster: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Run prompts from a file or data set. After an interruption the same command continues.

    specbatch generate prompts.jsonl -o answers.jsonl --max-new-tokens 256 --spec v2

    specbatch generate hf:openai/gsm8k:main --split test -o answers.parquet

    specbatch generate chats.parquet --column conversation -o answers/

    Each line of JSONL is an object with prompt, prompt_token_ids, question or messages, and optionally an id:

    {"prompt": "The capital of France is", "id": 1}

    {"messages": [{"role": "user", "content": "Name a river."}]}

    {"prompt": "Once upon a time", "sampling": {"temperature": 0.8, "n": 4, "max_new_tokens": 50}}

    Details:

    specbatch generate prompts.jsonl -o answers.jsonl --skip-bad

    specbatch generate mails.csv --column body -o answers.jsonl

    specbatch generate saved/ --split train -o answers/

    specbatch generate batch.jsonl -o s3://bucket/answers.jsonl --time-limit 30m

    The output has the order of the input; `index` is the position of the line or row in the input, from 0. A prompt
    that fails while it runs, because its logits are not finite, has a row with an `error` in place of an answer.

    An OpenAI batch file (custom_id, method, url, body) has OpenAI's output, and rows that fail are in
    OUT.errors.jsonl.
    """
    started = time.monotonic()
    with suppress(OSError, ValueError):  # no local file
        if (size := os.path.getsize(source)) > LARGE:
            say(f"reading {source}: {size / 1e6:.0f} MB")
    from specbatch.jobs.batch_job import BatchJob

    stops = Limits(**limits, started=started)
    params = SamplingParams(stop=tuple(stop or ()), **sampling)
    engine, workers = clustered(engine, cluster)
    config = engine.config(concurrency=concurrency, elsewhere=workers is not None)
    with progress(f"reading {source}", "rows") as report:
        job = BatchJob.open(
            source,
            output,
            config,
            params,
            settings=JobSettings(**settings),
            given=[name for name in (*sampling, "stop") if is_given(context, name)],
            log=say,
            report=report,
        )
    if job.complete is not None:
        say(f"{job.output.name} is complete: an earlier run has finished this job (--overwrite runs it again)")
        counts, metrics = job.complete["workload"]["output"], job.complete["metrics"]
    else:
        if job.finished:
            say(f"continuing: {len(job.finished)} of {job.total} are finished")
        with open_replicas(replace(config, job=job.size), workers) as running:
            running.reset_record(rows=False)
            with progress("generate", "prompts", len(job.finished)) as report:
                running.on_prefill = report.prefilled
                finished = job.run(running, concurrency=concurrency, limits=stops, report=report)
            record = running.record(concurrency=concurrency, workload={"command": "generate", **job.kept.header})
        say(f"generate: {summary(record.metrics, drafts=config.speculation.num_drafts > 0)}")
        if not finished:
            say(str(job.stopped))
            raise Exit(STOPPED)
        counts, metrics = job.counts(), record.metrics
        record.workload |= {"skipped": job.skipped, "output": counts}
        with reporting(lambda: f"the output is complete in {job.output.name}"):
            job.output.publish_record(record.summary())
    result = {"output": job.output.name, **counts, "record": job.output.record, "metrics": metrics}
    left_out = f", {counts['skipped']} malformed lines skipped" if counts["skipped"] else ""
    if counts["failed"]:
        of = f"failed rows in {job.output.errors}" if job.is_batch else "of them failed"
        left_out += f", {counts['failed']} {of}"
    count = f"answers to {counted(counts['prompts'], 'prompt')}"
    text = f"{count} in {job.output.name}{left_out}; configuration and metrics: {job.output.record}"
    show(text, result, as_json=as_json, kept=job.output.name)
    if counts["failed"] > max_failures:
        raise Exit(1)


def summary(metrics: Mapping[str, Any], *, drafts: bool) -> str:
    """The metrics of a run in one line."""
    answers = f"{counted(metrics['requests'], 'answer')}"
    line = f"{answers}, {metrics['output_tokens']} output tokens in {metrics['duration_s']:.1f} s"
    if metrics["output_throughput"] is not None:
        line += f": {metrics['output_throughput']:.0f} tok/s"
    if drafts and metrics["accept_length"] is not None:
        line += f", accept length {metrics['accept_length']:.2f}"
        if metrics.get("rows_per_verify") is not None:
            line += f" with {metrics['rows_per_verify']:.2f} rows per verify"
        if metrics.get("corpus_share") is not None:
            share, length = metrics["corpus_share"], metrics["corpus_accept_length"]
            line += f" ({share:.0%} of the drafts from the corpus, {length:.2f} with these)"
    return line
