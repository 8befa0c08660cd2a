"""The `specbatch` command. Each command parses, calls one function, prints.

Nothing heavy is imported before a command runs, so that `specbatch --help` answers at once. A user's mistake
is one line on standard error and exit status 2; Ctrl-C says what was kept and exits with 130.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from specbatch import SpecbatchError, __version__
from specbatch.commands.options import EngineOptions, takes_engine
from specbatch.commands.output import fresh_folder, open_engine, rows_table, say, show
from specbatch.errors import at_least, refuse
from specbatch.progress import progress


class Commands(TyperGroup):
    """Turns what a command raises into a line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecbatchError as error:
            say(f"error: {error}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stop:
            say("; ".join(["interrupted", *map(str, stop.args)]))
            raise typer.Exit(130) from stop


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
models = typer.Typer(no_args_is_help=True, help="Bundled models: list them, fetch one.")
app.add_typer(models, name="models")

# What `bench` decides itself, point by point.
BENCH_SETS = (
    *("spec", "algorithm", "draft", "draft_tokens", "draft_steps", "draft_topk", "ngram_min", "ngram_max"),
    *("simulate_accept_length", "draft_attention_backend", "decode_graph", "prefill_graph"),
    *("max_running", "max_model_len", "kv_pages", "prefix_cache"),
)
Json = Annotated[bool, Option("--json", help="Print one JSON line instead of tables.")]
Concurrency = Annotated[int | None, Option(help="Keep at most this many requests unfinished; also sets --max-running.")]
ChatTemplate = Annotated[
    bool, Option("--chat-template/--no-chat-template", help="Render messages by the model's template.")
]


@app.callback(invoke_without_command=True)
def specbatch(
    version: Annotated[bool, Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Offline batch inference and evaluation for speculative decoding.

    Does it still answer correctly?  specbatch eval one_digit_sums --spec v2

    What do v1 and v2 give me?       specbatch sweep --concurrency 1,8,32,128

    Run these prompts.               specbatch generate in.jsonl -o out.jsonl

    How fast is it on this device?   specbatch bench --model qwen3-8b --load-format dummy

    What runs on this machine?       specbatch doctor
    """
    if version:
        print(f"specbatch {__version__}")
        raise typer.Exit


@app.command("eval")
@takes_engine()
def evaluate(
    task: Annotated[str, Argument(help="one_digit_sums, gsm8k, gsm8k_platinum or another generating lm-eval task.")],
    engine: EngineOptions,
    limit: Annotated[int | None, Option(help="Only the first N questions.")] = None,
    num_fewshot: Annotated[
        int | None, Option(help="Worked examples before each question. Default: the task's.")
    ] = None,
    data: Annotated[Path | None, Option(help="JSONL of question and answer to be scored.")] = None,
    fewshot_data: Annotated[Path | None, Option(help="JSONL to take the worked examples from.")] = None,
    fewshot_seed: Annotated[int, Option(help="Of the choice of examples; 1234 is lm-eval's own.")] = 1234,
    chat_template: Annotated[bool, Option("--chat-template/--no-chat-template", help="Ask as a chat message.")] = False,
    max_new_tokens: Annotated[int | None, Option(help="Longest answer. Default: the task's, else 512.")] = None,
    concurrency: Concurrency = None,
    output: Annotated[Path | None, Option(help="New folder for the results. Default: out/eval-TIME.")] = None,
    as_json: Json = False,
) -> None:
    """Answer a task's questions, score them with lm-eval, and show acceptance and speed beside the score.

    specbatch eval one_digit_sums --limit 40

    specbatch eval gsm8k --data gsm8k_test.jsonl --limit 100 --spec v2

    one_digit_sums needs no network. Per-question results go to the output folder.
    """
    from specbatch.evals.run import PARTIAL, EvalOptions, prepare

    config = engine.config(concurrency=concurrency)
    with fresh_folder(output, "eval") as folder:
        options = EvalOptions(
            task=task,
            limit=limit,
            num_fewshot=num_fewshot,
            data=data,
            fewshot_data=fewshot_data,
            chat_template=chat_template,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            seed=fewshot_seed,
            output=folder,
        )
        ready = prepare(options)
        with open_engine(config) as running, progress(f"eval {task}") as report:
            try:
                result = ready.run(running, report)
            except KeyboardInterrupt:
                partial = folder / PARTIAL
                kept = partial.read_text().count("\n") if partial.exists() else 0
                if not kept:
                    partial.unlink(missing_ok=True)
                    raise
                raise KeyboardInterrupt(f"kept {kept} finished answers in {partial}") from None
    text = f"{result.table()}\n\nresults: {folder}"
    show(text, {**result.as_dict(), "output": str(folder)}, as_json=as_json)


@app.command()
@takes_engine(without=("spec",))
def sweep(
    engine: EngineOptions,
    concurrency: Annotated[str, Option(help="Comma-separated numbers of requests kept unfinished.")] = "1,8,32,128",
    configs: Annotated[str, Option(help="Some of baseline, v1, v2, v2+piecewise.")] = ("baseline,v1,v2"),
    dataset: Annotated[str, Option(help="random, gsm8k or FILE.jsonl.")] = "random",
    data: Annotated[Path | None, Option(help="The GSM8K file, for --dataset gsm8k.")] = None,
    input_len: Annotated[int, Option(help="Tokens per random prompt.")] = 128,
    output_len: Annotated[int, Option(help="Tokens per answer; the most, for datasets of text.")] = 128,
    prompts_per_concurrency: Annotated[
        int, Option(help="A point runs this many times its concurrency (4 at least).")
    ] = 4,
    repeats: Annotated[int, Option(help="Rounds over the configurations, A B C A B C.")] = 1,
    output: Annotated[Path | None, Option(help="New folder for the results. Default: out/sweep-TIME.")] = None,
    as_json: Json = False,
) -> None:
    """Compare configurations at several concurrencies, in one process, on the same prompts.

    specbatch sweep --concurrency 1,4 --input-len 64 --output-len 32

    specbatch sweep --dataset gsm8k --data gsm8k_test.jsonl --repeats 3

    specbatch sweep --draft self:skip=12-15 --draft-tokens 3

    baseline drafts nothing (schedule v2); v1 and v2 draft with ngram, or with --draft.

    Each point leaves record.json and requests.jsonl; the summary is made from them.
    """
    from dataclasses import replace

    from specbatch.sweeps.runner import SweepOptions, run_sweep
    from specbatch.sweeps.workloads import Workload

    steps = _whole_numbers("concurrency", concurrency)
    workload = Workload(dataset, data, input_len, output_len, prompts_per_concurrency, engine.seed)
    options = SweepOptions(steps, _names(configs), repeats, workload)
    config = replace(engine, spec="v2").config(concurrency=max(steps), prefix_cache=False)
    with fresh_folder(output, "sweep") as folder, progress("sweep") as report:
        summary = run_sweep(config, options, folder, log=say, report=report)
    show(
        f"{summary}\nresults: {folder}",
        {"output": str(folder), "rows": summary_rows(folder)},
        as_json=as_json,
    )


@app.command()
@takes_engine(without=BENCH_SETS)
def bench(
    engine: EngineOptions,
    sections: Annotated[str, Option(help="Some of machine, decode, closed, ttft, verify.")] = (
        "machine,decode,closed,ttft,verify"
    ),
    configs: Annotated[str | None, Option(help="Some of v1, v2, v2+piecewise. Default: what the device can.")] = None,
    decode_graph: Annotated[
        str | None, Option(metavar="whole|off", help="Default: whole on a CUDA device, off on a CPU.")
    ] = None,
    batch: Annotated[str, Option(help="Batch sizes of a decode step.")] = "1,32,128",
    verify_batch: Annotated[str, Option(help="Batch sizes of a verify of 16 rows.")] = "1,32",
    decode_tokens: Annotated[int, Option(help="Prompt tokens before a decode or verify step.")] = 512,
    new_tokens: Annotated[str, Option(help="Of the two runs whose difference is a step.")] = "32,288",
    concurrency: Annotated[str, Option(help="Requests that a closed loop keeps unfinished.")] = "1,8,32,128",
    input_len: Annotated[int, Option(help="Prompt tokens in a closed loop.")] = 1024,
    output_len: Annotated[int, Option(help="New tokens in a closed loop.")] = 256,
    ttft_tokens: Annotated[str, Option(help="Prompt tokens of a request alone.")] = "128,1024,8192",
    repeats: Annotated[int, Option(help="Rounds over the configurations, A B C A B C.")] = 3,
    peers: Annotated[Path | None, Option(help="CSV of other engines' figures to show beside ours.")] = None,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the results. Default: out/bench-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the engine against the device: decode and verify steps, closed loops, time to the first token.

    specbatch bench --model qwen3-8b --load-format dummy

    specbatch bench --model toy --load-format dummy --batch 1,4 --sections decode --repeats 1

    Exit status 1 if a point failed; the table says why.
    """
    from specbatch.sweeps.bench import BenchOptions, run_bench
    from specbatch.sweeps.bench_tables import load_records, read_peers, table

    options = BenchOptions(
        sections=_names(sections),
        configs=None if configs is None else _names(configs),
        decode_graph=decode_graph,
        batch=_whole_numbers("batch", batch),
        verify_batch=_whole_numbers("verify_batch", verify_batch),
        decode_tokens=decode_tokens,
        new_tokens=_whole_numbers("new_tokens", new_tokens),
        concurrency=_whole_numbers("concurrency", concurrency),
        input_len=input_len,
        output_len=output_len,
        ttft_tokens=_whole_numbers("ttft_tokens", ttft_tokens),
        repeats=repeats,
    )
    beside = read_peers(peers) if peers is not None else ""
    with fresh_folder(output, "bench") as folder, progress("bench") as report:
        text = run_bench(engine.config(), options, folder, peers=beside, log=say, report=report)
    rows = table(load_records(folder))
    show(f"{text}\nresults: {folder}", {"output": str(folder), "rows": rows}, as_json=as_json)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


@app.command("trace")
@takes_engine()
def trace_command(
    engine: EngineOptions,
    steps: Annotated[int, Option(help="Iterations to record.")] = 20,
    batch: Annotated[int, Option(help="Requests that decode together.")] = 1,
    input_len: Annotated[int, Option(help="Random prompt tokens of each.")] = 128,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the trace. Default: out/trace-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Record some decode steps: a Chrome trace, kernels by time, and every line at which the host waited.

    specbatch trace --spec v2 --steps 20

    specbatch trace --model qwen3-8b --load-format dummy --decode-graph whole --batch 32

    Open trace.json in chrome://tracing or ui.perfetto.dev.
    """
    from specbatch.sweeps.workloads import Workload
    from specbatch.trace import text, trace

    for name, value in (("steps", steps), ("batch", batch), ("input_len", input_len)):
        at_least(name, value, 1)
    config = engine.config(concurrency=batch, prefix_cache=False)
    workload = Workload(input_len=input_len, prompts_per_concurrency=1, seed=engine.seed)
    with fresh_folder(output, "trace") as folder, open_engine(config) as running:
        result = trace(running, workload.prompts(running.tokenizer, batch), steps, folder / "trace.json")
    shown = f"{text(result)}\n\ntrace: {folder / 'trace.json'}"
    show(shown, {"output": str(folder), **result}, as_json=as_json)


@app.command()
@takes_engine()
def generate(
    source: Annotated[Path, Argument(metavar="IN.jsonl", help="One prompt, question or messages object a line.")],
    engine: EngineOptions,
    output: Annotated[Path, Option("--output", "-o", metavar="OUT.jsonl", help="Appears when all is done.")],
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="1 is off.")] = 1.0,
    top_k: Annotated[int, Option(help="0 is off.")] = 0,
    min_p: Annotated[float, Option(help="0 is off.")] = 0.0,
    max_new_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    stop: Annotated[
        list[str] | None, Option(help="End an answer before this text; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past the model's own end tokens.")] = False,
    chat_template: ChatTemplate = True,
    concurrency: Concurrency = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Throw an existing output away.")] = False,
    as_json: Json = False,
) -> None:
    """Run the prompts of a JSONL file; the same command continues where an interrupted one stopped.

    specbatch generate prompts.jsonl -o answers.jsonl --max-new-tokens 256 --spec v2

    A line is an object with prompt, prompt_token_ids, question or messages, and an id if you like.
    """
    from specbatch.generate import BatchJob
    from specbatch.metrics import write_atomic
    from specbatch.request import SamplingParams

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
    job = BatchJob.open(source, output, config, params, chat_template=chat_template, overwrite=overwrite)
    if job.finished:
        say(f"continuing: {len(job.finished)} of {len(job.prompts)} are finished")
    with open_engine(config) as running, progress("generate") as report:
        rows = job.run(running, concurrency=concurrency, report=report)
        record = running.record(concurrency=concurrency, workload={"command": "generate", **job.header})
    beside = output.with_name(f"{output.name}.record.json")
    write_atomic(beside, record.summary())
    result = {"output": str(output), "rows": len(rows), "record": str(beside), "metrics": record.metrics}
    show(f"{len(rows)} rows in {output}; what they were made with, and how fast: {beside}", result, as_json=as_json)


@app.command("send-one")
@takes_engine()
def send_one(
    engine: EngineOptions,
    prompt: Annotated[str | None, Option(help="Your own prompt. Default: a fixed piece of code.")] = None,
    max_new_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    stream: Annotated[bool, Option("--stream", help="Print the text as it arrives.")] = False,
    as_json: Json = False,
) -> None:
    """Send one prompt, greedy, and show its latency, acceptance and speed.

    specbatch send-one

    specbatch send-one --spec v2 --prompt "def fibonacci(n):" --stream
    """
    from specbatch.request import SamplingParams
    from specbatch.send_one import PROMPT, table
    from specbatch.send_one import send_one as send

    if prompt == "":
        raise refuse("prompt", prompt, "is empty; write at least one token of text")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    config = engine.config(concurrency=1, prefix_cache=False)
    with open_engine(config) as running:
        result = send(running, prompt or PROMPT, params, write=_write_through if stream else None)
    if stream and as_json:
        print()  # the JSON is a line of its own
    show(f"{'' if stream else result['text']}\n\n{table(result)}", result, as_json=as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show the environment, the devices, and what runs here and what does not, with reasons."""
    from specbatch.doctor import examine, report

    found = examine()
    show(report(found), found, as_json=as_json)


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """Show the bundled models: where each comes from, its size, licence and whether it is here already."""
    from specbatch.weights import bundled

    rows = bundled.rows()
    show(rows_table(rows, without="sha256"), {"models": rows}, as_json=as_json)


@models.command("pull")
def pull_model(name: Annotated[str, Argument(help="For example smollm2-135m.")], as_json: Json = False) -> None:
    """Download a bundled model into the user's cache, checked by its hash.

    specbatch models pull smollm2-135m
    """
    from specbatch.weights import bundled

    path = bundled.pull(name, say)
    show(str(path), {"name": name, "path": str(path)}, as_json=as_json)


def summary_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of summary.csv as JSON values; None where nothing was measured."""
    from specbatch.sweeps.tables import load_records, table

    rows = table(load_records(folder))
    clean = rows.astype(object).where(rows.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in clean.to_dict("records")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _whole_numbers(setting: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise refuse(setting, text, "use whole numbers of at least 1, separated by commas: 1,8,32,128") from None


def _write_through(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    app()
