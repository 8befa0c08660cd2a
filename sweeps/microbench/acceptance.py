"""Accept length of several drafts on GSM8K answers, and whether each keeps the baseline's tokens.

Prompts are the first five rows of --fewshot-data and then the question, as plain text; greedy, float32, v2; an answer
ends at "Question:", at an end token or at 256 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.jobs.questions import read_questions
from specbatch.sweeps.microbench.runner import Row, Table

DRAFTS = {
    "baseline": Speculation(),
    **{
        f"self:skip=12-15, {count} drafted": Speculation("standalone", draft="self:skip=12-15", draft_tokens=count)
        for count in (3, 4, 7)
    },
    **{f"ngram 4..2, {count} drafted": Speculation("ngram", draft_tokens=count) for count in (4, 8)},
}


SETS = {"max_running": ("concurrency",)}


def tables(
    data: Annotated[Path, typer.Option(help="JSONL of question and answer.")],
    fewshot_data: Annotated[Path, typer.Option(help="JSONL whose first five rows are the examples.")],
    model: Annotated[str, typer.Option(help="Bundled name, .gguf file or folder.")] = "smollm2-135m",
    limit: Annotated[int, typer.Option(min=1)] = 200,
    concurrency: Annotated[int, typer.Option(min=1)] = 32,
) -> Iterator[Table]:
    shots = read_questions("fewshot_data", fewshot_data).rows[:5]
    head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shots)
    rows = read_questions("data", data).rows[:limit]
    prompts = [f"{head}Question: {row['question']}\nAnswer:" for row in rows]
    yield Table(_accept_lengths(model, prompts, concurrency))


def _accept_lengths(model: str, prompts: list[str], concurrency: int) -> Iterator[Row]:
    params = SamplingParams(max_new_tokens=256, stop=("Question:",))
    baseline: list[list[int]] = []
    for name, speculation in DRAFTS.items():
        config = EngineConfig(
            model=model, dtype="float32", max_running=concurrency, max_model_len=2048, speculation=speculation
        )
        with Engine(config) as engine:
            tokens = [item.token_ids for item in engine.generate(prompts, params)]
            metrics = engine.record().metrics
        baseline = baseline or tokens
        same = sum(ours == theirs for ours, theirs in zip(tokens, baseline, strict=True))
        row: Row = {"draft": name, "tokens": sum(map(len, tokens))}
        for column in ("accept_length", "accept_rate"):
            row[column.replace("_", " ")] = None if (value := metrics[column]) is None else f"{value:.3f}"
        yield row | {"answers equal to the baseline": f"{same}/{len(tokens)}"}
