"""`specbatch train-draft`: trains a draft head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions, Json, Output, options_of, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, say, show
from specbatch.cli.values import layers
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import refuse
from specbatch.files.atomic_file import is_leftover
from specbatch.progress.bars import progress
from specbatch.training.recipe import ANSWER_TOKENS, HEADS, SETTINGS, Recipe

if TYPE_CHECKING:
    from specbatch.jobs.prompts import Prompt

# The engine's options that matter for generating answers and for training.
_KEPT = (
    *("model", "device", "dtype", "load_format", "tokenizer", "max_running", "memory_fraction", "seed"),
    *("decode_graph", "prefill_graph", "attention_backend"),
)
_WITHOUT = tuple(name for name in ENGINE_OPTIONS if name not in _KEPT)
_DATA, _HEAD, _TRAINING = "Data", "Head", "Training"
_PANELS = dict.fromkeys(SETTINGS, _HEAD)
_in_data = partial(Option, rich_help_panel=_DATA)


@takes_engine(
    without=_WITHOUT,
    defaults={"max_running": str(EngineConfig.max_running)},
    training=options_of(Recipe, _TRAINING, _PANELS),
)
def train_draft(
    *,
    engine: EngineOptions,
    algorithm: Annotated[str, Option(metavar="|".join(HEADS), help="The kind of draft head.", rich_help_panel=_HEAD)],
    output: Output = None,
    data: Annotated[
        Path | None,
        _in_data(
            help="JSONL or Parquet of prompt, question, messages or prompt_token_ids. The model generates the answers."
        ),
    ] = None,
    answers: Annotated[
        Path | None, _in_data(help="Instead of --data: answers.jsonl of an earlier run for this model.")
    ] = None,
    task: Annotated[
        str | None,
        _in_data(
            help="Ask the questions in --data as this lm-eval task does, such as gsm8k: as text, after few-shot "
            "examples, and with its stop strings."
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, _in_data(help="With --task: examples before each question. Default: the task's number.")
    ] = None,
    limit: Annotated[int | None, _in_data(help="Use only the first N prompts.")] = None,
    max_new_tokens: Annotated[int, _in_data(help="Maximum number of tokens per answer.")] = ANSWER_TOKENS,
    temperature: Annotated[float, _in_data(help="Sampling temperature of the answers; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, _in_data(help="Nucleus sampling of the answers; 1 is off.")] = 1.0,
    chat_template: Annotated[bool, _in_data(help="Render messages with the model's chat template.")] = True,
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
    from specbatch.core.request import SamplingParams
    from specbatch.core.sampling_params import refuse_unsampled
    from specbatch.training.answers import ANSWERS
    from specbatch.training.run import Source
    from specbatch.training.run import train_draft as run
    from specbatch.training.saved_state import FILE as STATE

    training["aux_layers"] = layers("aux_layers", training["aux_layers"])
    recipe = Recipe(algorithm=algorithm, seed=engine.seed, **training)
    prompts, stop = _asked(task, num_fewshot, data)
    params = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, stop=stop)
    refuse_unsampled({"temperature": temperature, "top_p": top_p})
    asked = None if task is None else {"task": task, "num_fewshot": num_fewshot}
    source = Source(data, answers, params, chat_template, limit, asked, prompts)
    config = engine.having(max_model_len=recipe.max_len).config()
    begun = (
        output is not None
        and output.is_dir()
        and any(path.name == STATE or is_leftover(path) for path in output.iterdir())
    )
    resumes = "*" if begun else ANSWERS
    with fresh_folder(output, "train-draft", resumes=resumes) as folder:
        record = run(config, source, recipe, folder, open_engine=open_engine, progress=progress, log=say)
    text = f"{_table(record['history']['measured'])}\n\nhead: {folder}"
    show(text, {**record, "output": str(folder)}, as_json=as_json, kept=str(folder))


def _asked(
    task: str | None, num_fewshot: int | None, data: Path | None
) -> tuple[Sequence[Prompt] | None, tuple[str, ...]]:
    """The prompts of a task over the questions in `data`, and its stop strings; None and none without a task."""
    if task is None:
        if num_fewshot is not None:
            raise refuse("num_fewshot", num_fewshot, "goes with --task; leave it out")
        return None, ()
    if data is None:
        raise refuse("task", task, "asks the questions in --data, such as those of a training set; give one")
    from specbatch.evals.prompts import task_prompts

    return task_prompts(task, data, as_messages=False, num_fewshot=num_fewshot)


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
