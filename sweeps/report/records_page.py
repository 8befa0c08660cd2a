"""Documentation made from the registry of metrics and the dataclasses of records: docs/records.md, which has every file
of a run with its fields and columns, and the lists of metrics in docs/glossary.md and docs/ci-gate.md.

python -m specbatch.sweeps.report.records_page docs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

from specbatch.core.completion import RequestMetrics
from specbatch.jobs.frames import POINT
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS, RELATIVE, glossary
from specbatch.records.provenance import PREFIXES, VARIABLES
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.compare import COMPARED
from specbatch.sweeps.report.points import SWEEP

VARIABLES_TEXT = " and ".join(f"`{name}`" for name in (*VARIABLES, *(f"{prefix}*" for prefix in PREFIXES)))
FILES = {
    "sweep": "`sweep.json` (the plan), `CONFIGURATION/cN/rN/record.json` and `requests.jsonl` for each point "
    "(concurrency N, repeat N), `summary.csv`, `summary.md`",
    "bench": "a folder of `sweep` for each section, `summary.csv`, `summary.md`",
    "eval": "`record.json`, `requests.jsonl`, `questions.jsonl` (a line per answer, with its scores), `summary.csv`, "
    "`summary.md`, and [lm-eval's files](evaluation.md#files-for-lm-evals-tools) in `MODEL/`; with `--configs` the "
    "folder of a sweep, with such files but lm-eval's for each point, and `summary.json`",
    "check": "`record.json`, `requests.jsonl`, `prompts.jsonl` (a line per prompt: where it diverges), `summary.md`; "
    "of a server `answers.jsonl` (every answer) and `divergences.jsonl` in place of `prompts.jsonl`",
    "generate": "`OUT`, and `OUT.record.json`",
}


def documented(written: type) -> dict[str, str]:
    """What is written beside the fields of a dataclass."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(written, include_extras=True).items()}


REQUEST = {
    "index": "place of the prompt in the input, from 0",
    "sample": "number of the sample, from 0; absent for the first",
    "request_id": "the caller's name of the prompt, if given",
    "finish_reason": "`stop`, `length`, `abort` or `error`",
    "seed": "that the caller gave; null: none, so that the engine derived one from its own seed and `index`",
    "error": "why the request failed, if it did",
    "category": "category of the prompt, if the data set has them",
    "turn": "turn of a conversation, from 1, if prompts have several",
    **documented(RequestMetrics),
    "text_digest": "of `sweep` and `eval`: the start of the SHA-256 of the answer's text, to compare answers",
    "token_digest": "the same of its token ids; absent for a server, which reports none",
}


def page() -> str:
    """The whole page, in Markdown."""
    shared = "path", *POINT
    record = documented(RunRecord)
    record["provenance"] = record["provenance"].format(variables=VARIABLES_TEXT)
    parts = [
        "# Records",
        "Every run leaves its numbers in plain files. Tables, plots, `compare`, `gate` and `report` are made from them "
        "alone. This page is made by `python -m specbatch.sweeps.report.records_page docs`.",
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
        _table(record, "field", "content"),
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
        ", ".join(f"`{name}`" for name in (*SWEEP.keys, *RELATIVE)),
    ]
    return "\n\n".join(parts) + "\n"


def _definition(metric: Metric) -> str:
    return f"{metric.title.split()[0]}: {metric.definition}" if metric.quantity else metric.definition


def _table(rows: dict[str, str], *headings: str) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in rows.items())]
    return "\n".join(lines)


def glossary_list() -> str:
    """A Markdown list of every quantity with its definition and its names in records."""
    names: dict[str, dict[str, None]] = {}
    for metric in (METRICS | RELATIVE).values():
        names.setdefault(metric.quantity or metric.title, {})[metric.field or metric.key] = None
    found = ((name, "".join(f", `{key}`" for key in names.get(name, ())), text) for name, text in glossary())
    return "".join(f"* **{name}**{keys}: {text}\n" for name, keys, text in found)


def gate_row() -> str:
    """The line of a Markdown table with the metrics that `compare` shows, by direction: those that `gate` may bound."""
    by_direction = (
        ", ".join(f"`{key}`" for key in COMPARED if METRICS[key].better == better) for better in ("higher", "lower")
    )
    return f"| {' | '.join(by_direction)} |\n"


def renewed(name: str, text: str) -> str:
    """A page of the documentation with its lists made again."""
    place, made = _LISTS[name]
    found, count = re.subn(place, lambda match: made(), text, count=1, flags=re.MULTILINE)
    if not count:
        raise ValueError(f"{name} has no list of metrics")
    return found


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """The pages as they should be."""
    yield folder / "records.md", page()
    for name in _LISTS:
        yield folder / name, renewed(name, (folder / name).read_text(encoding="utf-8"))


# By page: what is replaced, and what makes it.
_LISTS = {
    "glossary.md": (r"(^\* \*\*.*\n)+", glossary_list),
    "ci-gate.md": (r"(?<=\| higher is better \| lower is better \|\n\|---\|---\|\n).*\n", gate_row),
}

if __name__ == "__main__":
    for path, text in pages(Path(sys.argv[1])):
        path.write_text(text, encoding="utf-8")
