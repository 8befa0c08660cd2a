"""docs/records.md: every file of a run and every field and column of them, made from the registry of metrics.

python -m specbatch.sweeps.report.records_page > docs/records.md
"""

from __future__ import annotations

from dataclasses import fields

from specbatch.core.request import RequestMetrics
from specbatch.jobs.frames import POINT
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS, RELATIVE
from specbatch.records.provenance import PREFIXES, VARIABLES
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.tables import COLUMNS

VARIABLES_TEXT = " and ".join(f"`{name}`" for name in (*VARIABLES, *(f"{prefix}*" for prefix in PREFIXES)))
FILES = {
    "sweep": "`sweep.json` (the plan), `CONFIGURATION/cN/rN/record.json` and `requests.jsonl` for each point "
    "(concurrency N, repeat N), `summary.csv`, `summary.md`",
    "bench": "a folder of `sweep` for each section, `summary.csv`, `summary.md`",
    "eval": "`record.json`, `requests.jsonl`, `questions.jsonl` (a line per answer, with its scores), `summary.csv`, "
    "`summary.md`, and [lm-eval's files](evaluation.md#files-for-lm-evals-tools) in `MODEL/`; with `--configs` the "
    "folder of a sweep, with such files but lm-eval's for each point, and `summary.json`",
    "check": "`record.json`, `requests.jsonl`, `prompts.jsonl` (a line per prompt: where it diverges), `summary.md`",
    "generate": "`OUT`, and `OUT.record.json`",
}
RECORD = {
    "config": "settings of the engine, as they were resolved",
    "caps": "what the engine could hold after the memory plan, and its device, dtype and backends; of a server "
    "`server_version`, if it tells",
    "metrics": "the numbers of the run: the table of metrics below",
    "counters": "counts that metrics and tables are computed from: iterations, graph replays, acceptance by draft "
    "position and by context; of a server `errors`, `server_acceptance` (verifies with drafts, and how many accepted "
    "each draft), where the accept length comes from, `resent_requests` and `client_cpu_share`",
    "requests": "not in the file: the lines of `requests.jsonl`",
    "workload": "what was run: the command, the prompts with their hash, lengths, sampling, latency objectives "
    "(`slo`), and the place of a point in its sweep",
    "versions": "of specbatch, Python, PyTorch, Triton and other packages",
    "hardware": "CPU, cores and memory; on a GPU its name, memory, CUDA version (`cuda`) and NVIDIA driver (`driver`)",
    "provenance": "how the run was started: `command`, the arguments; `git`, the revision of specbatch and whether its "
    f"checkout was changed (`dirty`), absent where it is unknown; `environment`, the variables {VARIABLES_TEXT} that "
    "were set. Values of options and variables with names such as `--api-key`, and user, password and query of URLs, "
    "are never kept, nor are the arguments of a program that calls `Engine` itself. Earlier versions did not record it",
    "created": "when the run ended (ISO 8601, UTC)",
    "schema": "version of this format",
}
REQUEST = {
    "index": "place of the prompt in the input, from 0",
    "sample": "number of the sample, from 0; absent for the first",
    "request_id": "the caller's name of the prompt, if given",
    "finish_reason": "`stop`, `length`, `abort` or `error`",
    "seed": "that the caller gave; null: none, so that the engine derived one from its own seed and `index`",
    "error": "why the request failed, if it did",
    "category": "category of the prompt, if the data set has them",
    "turn": "turn of a conversation, from 1, if prompts have several",
    "prompt_tokens": "tokens of the prompt",
    "embedded_tokens": "of them, tokens that were given as embeddings",
    "cached_tokens": "of them, tokens that came from the prefix cache",
    "output_tokens": "tokens generated",
    "queue_s": "seconds until the request was admitted",
    "ttft_s": "seconds until its first token",
    "tpot_s": "seconds per token after the first; null with one token",
    "e2e_s": "seconds until its last token",
    "verify_steps": "verifies from which a token was kept",
    "emitted": "tokens emitted by them",
    "drafted": "drafts that count in the accept rate",
    "accepted": "drafts that were accepted",
    "accept_length": "emitted / verifies; null without a verify",
    "budget_rows": "rows of them with a verify budget: newest token and drafts that were verified",
    "corpus_verifies": "verifies whose drafts came from the corpus",
    "corpus_emitted": "tokens emitted by them",
    "corpus_drafted": "their drafts that count in the accept rate",
    "corpus_accepted": "their drafts that were accepted",
    "emitted_histogram": "verifies that emitted 0, 1, 2, ... tokens",
    "acceptance": "counts by draft position (`drafted`, `tried`, `accepted`) and by length of the context (`context`: "
    "tokens, verifies, emitted tokens)",
    "itl_s": "seconds between arrivals of tokens, divided among the tokens of an arrival",
    "retractions": "times that the request gave its KV pages back",
    "text_digest": "of `sweep`: the start of the SHA-256 of the answer's text, to compare answers",
    "token_digest": "the same of its token ids; absent for a server, which reports none",
}


def page() -> str:
    """The whole page, in Markdown."""
    assert RECORD.keys() == {item.name for item in fields(RunRecord)}
    assert {item.name for item in fields(RequestMetrics)} <= REQUEST.keys()
    shared = "path", *POINT
    parts = [
        "# Records",
        "Every run leaves its numbers in plain files. Tables, plots, `compare`, `gate` and `report` are made from them "
        "alone. This page is made by `python -m specbatch.sweeps.report.records_page`.",
        "## Files",
        _table(FILES, "command", "files"),
        "## In Python",
        "`specbatch.load_run(path)` reads a folder of any command, a part of one, an output of `generate`, or records "
        "that `specbatch report --records` packed into a `.tar.xz`, into three pandas frames: `points` (a row per "
        "record, with its settings, `command`, `revision`, `driver`, `cuda` and every metric below), `requests` (a "
        "row per request) and `drafts` (acceptance by draft position). They share the columns "
        f"{', '.join(map('`{}`'.format, shared))}.",
        '```py\nimport specbatch\n\nrun = specbatch.load_run("out/sweep-20260102-030405")\n'
        'run.points.pivot_table("output_throughput", "concurrency", "configuration")\n'
        'run.requests.groupby("configuration").ttft_s.describe()\n```',
        "## record.json",
        _table(RECORD, "field", "content"),
        "### metrics",
        "Times are in seconds and shares from 0 to 1; null where nothing was measured. The "
        "[glossary](glossary.md) has the formulas.",
        _table({key: _definition(metric) for key, metric in (METRICS | RELATIVE).items()}, "metric", "definition"),
        "## requests.jsonl",
        "A line per request, in the order in which they ended. Lines of scored texts have `prompt_tokens`, "
        "`scored_tokens`, `logprob` and `is_greedy`.",
        _table(REQUEST, "field", "content"),
        "## summary.csv",
        "A row per concurrency and configuration: `concurrency`, `configuration`, `simulated_accept_length`, "
        "`simulated_acceptance`, `repeats`, `failed` (the reason), and these columns. The first one also has `_min` "
        "and `_max` over repeats, and the last three have their 95% interval as `_low` and `_high`. "
        "`step_ratio_verdict` and `ratio_verdict` are `pays`, `loses`, `undecided`, `one repeat` or `not interleaved`. "
        "Names and units are those of the metrics. `base` is the configuration that the row is compared with; the "
        "column is there if not all rows have the same. `mean_queue_s` is empty without a request rate.",
        ", ".join(f"`{name}`" for name in (*COLUMNS, *RELATIVE)),
    ]
    return "\n\n".join(parts) + "\n"


def _definition(metric: Metric) -> str:
    return f"{metric.title.split()[0]}: {metric.definition}" if metric.quantity else metric.definition


def _table(rows: dict[str, str], *headings: str) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in rows.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
