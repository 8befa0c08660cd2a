"""Accept length of several drafts on GSM8K answers, and whether each leaves plain decoding's tokens.

    python sweeps/microbench/acceptance.py --data gsm8k_test.jsonl --fewshot-data gsm8k_train.jsonl --limit 200

Prompts are the first five rows of --fewshot-data and then the question, as plain text; greedy, float32, v2; an answer
ends at "Question:", at an end token or at 256 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbatch import Engine, EngineConfig, SamplingParams, SpecbatchError, Speculation
from specbatch.evals.data import read_questions

DRAFTS = {
    "plain decoding": Speculation(),
    **{
        f"self:skip=12-15, {count} drafted": Speculation("standalone", draft="self:skip=12-15", draft_tokens=count)
        for count in (3, 4, 7)
    },
    **{f"ngram 4..2, {count} drafted": Speculation("ngram", draft_tokens=count) for count in (4, 8)},
}


def accept_lengths(model: str, prompts: list[str], concurrency: int) -> list[dict[str, object]]:
    """One row per draft."""
    params = SamplingParams(max_new_tokens=256, stop=("Question:",))
    rows: list[dict[str, object]] = []
    plain: list[list[int]] = []
    for name, speculation in DRAFTS.items():
        config = EngineConfig(
            model=model, dtype="float32", max_running=concurrency, max_model_len=2048, speculation=speculation
        )
        with Engine(config) as engine:
            tokens = [item.token_ids for item in engine.generate(prompts, params)]
            numbers = engine.record().metrics
        plain = plain or tokens
        same = sum(ours == theirs for ours, theirs in zip(tokens, plain, strict=True))
        rows.append(
            {
                "draft": name,
                "tokens": sum(map(len, tokens)),
                "accept length": numbers["accept_length"],
                "accept rate": numbers["accept_rate"],
                "answers equal to plain decoding": f"{same}/{len(tokens)}",
            }
        )
    return rows


def main(
    data: Annotated[Path, typer.Option(help="JSONL of question and answer.")],
    fewshot_data: Annotated[Path, typer.Option(help="JSONL whose first five rows are the examples.")],
    model: Annotated[str, typer.Option(help="Bundled name, .gguf file or folder.")] = "smollm2-135m",
    limit: Annotated[int, typer.Option(min=1)] = 200,
    concurrency: Annotated[int, typer.Option(min=1)] = 32,
) -> None:
    """Measure acceptance on real answers."""
    from tabulate import tabulate

    try:
        shots = read_questions("fewshot_data", fewshot_data).rows[:5]
        head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shots)
        rows = read_questions("data", data).rows[:limit]
        prompts = [f"{head}Question: {row['question']}\nAnswer:" for row in rows]
        found = accept_lengths(model, prompts, concurrency)
    except SpecbatchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    print(tabulate(found, headers="keys", tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    typer.run(main)
