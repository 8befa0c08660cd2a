"""`specbatch train-draft`: trains a draft head."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from typer import Option

from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions, Json, Output, options_of, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, say, show
from specbatch.config.draft_shape import AUTO
from specbatch.files.atomic_file import is_leftover
from specbatch.progress.bars import progress
from specbatch.training.recipe import HEADS, SETTINGS, Recipe
from specbatch.training.source import Source

# The engine's options that matter for generating answers and for training.
_KEPT = (
    *("model", "device", "dtype", "load_format", "tokenizer", "max_running", "memory_fraction", "seed"),
    *("decode_graph", "prefill_graph", "attention_backend"),
)
_WITHOUT = tuple(name for name in ENGINE_OPTIONS if name not in _KEPT)
_DATA, _HEAD, _TRAINING = "Data", "Head", "Training"
_PANELS = dict.fromkeys(SETTINGS, _HEAD)


@takes_engine(
    without=_WITHOUT,
    defaults={"max_running": AUTO},
    source=options_of(Source, _DATA),
    training=options_of(Recipe, _TRAINING, _PANELS),
)
def train_draft(
    *,
    engine: EngineOptions,
    algorithm: Annotated[str, Option(metavar="|".join(HEADS), help="The kind of draft head.", rich_help_panel=_HEAD)],
    output: Output = None,
    source: dict[str, Any],
    training: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Train a draft head on the model's own answers, and write it in its published format.

    specbatch train-draft --algorithm eagle3 --data gsm8k_train.jsonl --limit 300 --steps 300 --out head

    specbatch sweep --draft head --algorithm eagle3 --dataset gsm8k

    specbatch train-draft --algorithm dflash --answers head/answers.jsonl --out block

    specbatch train-draft --algorithm eagle3 --task gsm8k --data gsm8k_train.jsonl --max-len 2048 --out head

    Use prompts like those of the later workload, in the same format: this matters more than the number of steps. The
    output of mtp is the model with its head; use it as --model. After Ctrl-C the same command with the same --out
    continues; during training Ctrl-C also writes the head as it is. After a crash it continues, too, from the finished
    answers and the last state of the training, which is saved every two minutes.
    """
    from specbatch.training.answers import ANSWERS
    from specbatch.training.run import train_draft as run
    from specbatch.training.saved_state import FILE as STATE

    recipe = Recipe(algorithm=algorithm, seed=engine.seed, **training)
    of_answers = Source(**source)
    if of_answers.task is not None:
        from specbatch.evals.prompts import task_prompts

        assert of_answers.data is not None
        prompts, stop = task_prompts(
            of_answers.task, of_answers.data, as_messages=False, num_fewshot=of_answers.num_fewshot
        )
        of_answers = replace(of_answers, prompts=prompts, stop=stop)
    config = engine.having(max_model_len=recipe.max_len).config()
    begun = (
        output is not None
        and output.is_dir()
        and any(path.name == STATE or is_leftover(path) for path in output.iterdir())
    )
    resumes = "*" if begun else ANSWERS
    with fresh_folder(output, "train-draft", resumes=resumes) as folder:
        record = run(config, of_answers, recipe, folder, open_engine=open_engine, progress=progress, log=say)
    text = f"{_table(record['history']['measured'])}\n\nhead: {folder}"
    show(text, {**record, "output": str(folder)}, as_json=as_json, kept=str(folder))


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
