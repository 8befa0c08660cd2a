"""The command that runs a user's prompts."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from specbatch.cli.options import Concurrency, EngineOptions, Json, takes_engine
from specbatch.cli.output import open_engine, say, show
from specbatch.progress import progress


@takes_engine()
def generate(
    source: Annotated[
        str,
        Argument(
            metavar="IN",
            help="JSONL; a .parquet, .arrow, .csv, .tsv or .json file; a folder of save_to_disk; or hf:OWNER/NAME of "
            "the hub, with @REVISION and :CONFIG behind it if need be.",
        ),
    ],
    engine: EngineOptions,
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            metavar="OUT",
            help="FILE.jsonl, FILE.parquet or a folder for load_from_disk. Appears when all is done.",
        ),
    ],
    split: Annotated[str | None, Option(help="Of a data set: test, or of the hub also train[:100].")] = None,
    column: Annotated[
        str | None,
        Option(
            help="Key or column that holds the prompt: text, chat messages or token ids. Default: whichever of prompt, "
            "prompt_token_ids, question, messages is there."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, Option("--skip-bad", help="Leave bad lines out, each reported, in place of running nothing.")
    ] = False,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="1 is off.")] = 1.0,
    top_k: Annotated[int, Option(help="0 is off.")] = 0,
    min_p: Annotated[float, Option(help="0 is off.")] = 0.0,
    max_new_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    stop: Annotated[
        list[str] | None, Option(help="End an answer before this text; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past the model's own end tokens.")] = False,
    chat_template: Annotated[
        bool, Option("--chat-template/--no-chat-template", help="Render messages by the model's template.")
    ] = True,
    concurrency: Concurrency = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Throw an existing output away.")] = False,
    as_json: Json = False,
) -> None:
    """Run prompts from a file or a data set; the same command continues where an interrupted one stopped.

    specbatch generate prompts.jsonl -o answers.jsonl --max-new-tokens 256 --spec v2

    specbatch generate prompts.jsonl -o answers.jsonl --skip-bad

    specbatch generate hf:openai/gsm8k:main --split test -o answers.parquet

    specbatch generate chats.parquet --column conversation -o answers/

    specbatch generate mails.csv --column body -o answers.jsonl

    specbatch generate saved/ --split train -o answers/

    A line of JSONL is an object with prompt, prompt_token_ids, question or messages, and an id if you like:

    {"prompt": "The capital of France is", "id": 1}

    {"messages": [{"role": "user", "content": "Name a river."}]}

    Rows keep the order of the input; the index of each is the place of its line or row there, from 0.
    """
    from specbatch.atomic_file import write_atomic
    from specbatch.core.request import SamplingParams
    from specbatch.jobs.batch_job import BatchJob, summary

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
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
    beside = job.output.with_name(f"{job.output.name}.record.json")
    write_atomic(beside, record.summary())
    left_out = f", {len(job.skipped)} bad lines skipped" if job.skipped else ""
    result = {
        "output": str(job.output),
        "rows": len(rows),
        "skipped": len(job.skipped),
        "record": str(beside),
        "metrics": record.metrics,
    }
    text = f"{len(rows)} rows in {job.output}{left_out}; what they were made with, and how fast: {beside}"
    show(text, result, as_json=as_json)
