"""`specbatch train-draft`: trains a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions, Json, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, say, show
from specbatch.progress import progress
from specbatch.training.recipe import ANSWER_TOKENS

# The engine's options that matter for generating answers and for training.
_KEPT = (
    *("model", "device", "dtype", "load_format", "tokenizer", "max_running", "memory_fraction", "seed"),
    *("decode_graph", "prefill_graph", "attention_backend"),
)
_WITHOUT = tuple(name for name in ENGINE_OPTIONS if name not in _KEPT)
_DATA, _HEAD, _TRAINING = "Data", "Head", "Training"


@takes_engine(without=_WITHOUT)
def train_draft(
    engine: EngineOptions,
    algorithm: Annotated[
        str, Option(metavar="eagle3|dflash|mtp", help="The kind of draft head.", rich_help_panel=_HEAD)
    ],
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the head. Default: out/train-draft-TIME.")
    ] = None,
    data: Annotated[
        Path | None,
        Option(
            help="JSONL or Parquet of prompt, question, messages or prompt_token_ids. The model generates the answers.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        Option(help="Instead of --data: answers.jsonl of an earlier run for this model.", rich_help_panel=_DATA),
    ] = None,
    limit: Annotated[int | None, Option(help="Use only the first N prompts.", rich_help_panel=_DATA)] = None,
    max_new_tokens: Annotated[
        int, Option(help="Maximum number of tokens per answer.", rich_help_panel=_DATA)
    ] = ANSWER_TOKENS,
    temperature: Annotated[
        float, Option(help="Sampling temperature of the answers; 0 is greedy.", rich_help_panel=_DATA)
    ] = 0.0,
    top_p: Annotated[float, Option(help="Nucleus sampling of the answers; 1 is off.", rich_help_panel=_DATA)] = 1.0,
    chat_template: Annotated[
        bool,
        Option(
            "--chat-template/--no-chat-template",
            help="Render messages with the model's chat template.",
            rich_help_panel=_DATA,
        ),
    ] = True,
    held_out: Annotated[
        int, Option(help="Answers that are not trained on, but used to measure the head.", rich_help_panel=_DATA)
    ] = 32,
    unroll: Annotated[
        int | None,
        Option(help="eagle3, mtp: length of the draft chains in training. Default: 5.", rich_help_panel=_HEAD),
    ] = None,
    vocab: Annotated[
        int | None,
        Option(
            help="eagle3: size of the draft vocabulary, made of the most frequent tokens. Default: 32000 or all.",
            rich_help_panel=_HEAD,
        ),
    ] = None,
    draft_layers: Annotated[
        int | None, Option(help="dflash: number of layers. Default: 2.", rich_help_panel=_HEAD)
    ] = None,
    block_size: Annotated[
        int | None,
        Option(help="dflash: rows of a block, including the newest token. Default: 8.", rich_help_panel=_HEAD),
    ] = None,
    steps: Annotated[int, Option(help="Number of optimizer steps.", rich_help_panel=_TRAINING)] = 1000,
    batch_tokens: Annotated[int, Option(help="Tokens per step, including padding.", rich_help_panel=_TRAINING)] = 4096,
    max_len: Annotated[
        int, Option(help="Longest prompt + answer; longer answers are truncated.", rich_help_panel=_TRAINING)
    ] = 1024,
    lr: Annotated[
        float, Option(help="Peak learning rate; large models need less, such as 1e-4.", rich_help_panel=_TRAINING)
    ] = 5e-4,
    as_json: Json = False,
) -> None:
    """Train a draft head on the model's own answers, and write it in its published format.

    specbatch train-draft --algorithm eagle3 --data gsm8k_train.jsonl --limit 300 --steps 300 --out head

    specbatch sweep --draft head --algorithm eagle3 --dataset gsm8k

    specbatch train-draft --algorithm dflash --answers head/answers.jsonl --out block

    Use prompts like those of the later workload, in the same format: this matters more than the number of steps. The
    output of mtp is the model with its head; use it as --model. Ctrl-C keeps the head as it is, or, while answers are
    generated, the finished ones. The same command with the same --out continues from there, also after a crash.
    """
    from specbatch.core.request import SamplingParams
    from specbatch.training.answers import ANSWERS
    from specbatch.training.files import UNFINISHED
    from specbatch.training.recipe import Recipe
    from specbatch.training.run import Source
    from specbatch.training.run import train_draft as run

    recipe = Recipe(
        algorithm=algorithm,
        steps=steps,
        batch_tokens=batch_tokens,
        max_len=max_len,
        lr=lr,
        held_out=held_out,
        seed=engine.seed,
        unroll=unroll,
        vocab=vocab,
        draft_layers=draft_layers,
        block_size=block_size,
    )
    params = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    source = Source(data, answers, params, chat_template, limit)
    config = engine.having(max_model_len=max_len).config()
    resumes = "*" if output is not None and (output / UNFINISHED).is_dir() else ANSWERS
    with fresh_folder(output, "train-draft", resumes=resumes) as folder:
        record = run(config, source, recipe, folder, open_engine=open_engine, progress=progress, log=say)
    text = f"{_table(record['history']['measured'])}\n\nhead: {folder}"
    show(text, {**record, "output": str(folder)}, as_json=as_json)


def _table(measured: dict[int, dict[str, Any]]) -> str:
    """Held-out accuracy by draft position, before and after training."""
    from tabulate import tabulate

    steps = [min(measured), max(measured)]
    rows = [
        [f"after {step} steps", measured[step]["accept_length"], *(100 * share for share in measured[step]["accuracy"])]
        for step in steps
    ]
    places = [f"draft {k + 1} (%)" for k in range(len(measured[steps[0]]["accuracy"]))]
    return tabulate(
        rows, ["held out", "accept length", *places], tablefmt="github", floatfmt=("", ".2f", *[".1f"] * 64)
    )
