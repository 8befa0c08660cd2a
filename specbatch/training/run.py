"""`specbatch train-draft`, from prompts to files: answers, training, the head, and a record of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specbatch import weights
from specbatch.algorithms import ALGORITHMS
from specbatch.config.engine_config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.errors import refuse, reporting
from specbatch.files.atomic_file import write_json
from specbatch.jobs.prompts import read_prompts
from specbatch.progress.bars import Report
from specbatch.records.environment import hardware, versions
from specbatch.runtime.device import find_device, find_dtype, type_name
from specbatch.training import files
from specbatch.training.answers import ANSWERS, answer, header_of, partial_answers, read_answers, with_room
from specbatch.training.data import Example, answers_hash, split
from specbatch.training.recipe import Recipe
from specbatch.training.saved_state import SavedState
from specbatch.training.source import Source
from specbatch.training.target import Target
from specbatch.training.trainer import History, make_head, method_of, train
from specbatch.weights.cache import file_hash

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine
    from specbatch.weights import Checkpoint

RECORD = "record.json"
OpenEngine = Callable[[EngineConfig], AbstractContextManager["Engine"]]


class Progress(Protocol):
    """Shows the progress of something under a label, in a unit."""

    def __call__(self, label: str, unit: str) -> AbstractContextManager[Report]: ...


def train_draft(
    config: EngineConfig,
    source: Source,
    recipe: Recipe,
    folder: Path,
    *,
    open_engine: OpenEngine,
    progress: Progress,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train a head for `config.model`, write it to `folder`, and return the record.

    `folder` exists and is empty, or has what an interrupted run with the same settings left: answers, which are reused,
    the state of its training, which continues, or an incompletely written head. Raises SpecbatchError for what cannot
    be trained. If answering is interrupted, finished answers are kept; if training is, its state and the head as it is.
    Both re-raise KeyboardInterrupt.
    """
    device = find_device(config.device)
    checkpoint = weights.open_checkpoint(
        config.model,
        config.load_format,
        seed=config.seed,
        tokenizer=config.tokenizer,
        log=log,
        max_model_len=recipe.max_len,
    )
    dtype = find_dtype(config.dtype, checkpoint.config.dtype, device)
    if dtype == torch.float16:
        raise refuse("dtype", "float16", "small gradients underflow; use bfloat16 or float32")
    if recipe.max_len > checkpoint.config.max_position:
        works = f"{checkpoint.name} has {checkpoint.config.max_position} positions; use at most that"
        raise refuse("max_len", recipe.max_len, works)
    recipe.vocabulary(checkpoint.config.vocab_size)
    in_target = ALGORITHMS[recipe.algorithm].in_target
    beside = method_of(recipe).takes_a_head(checkpoint) if in_target else None
    examples, described = _examples(config, source, recipe, checkpoint, dtype, folder, open_engine, progress, log)
    kept, held_out = split(examples, recipe.held_out)
    log(f"data: {len(kept)} answers to train on, {len(held_out)} held out; {described['answer_tokens']} tokens in all")
    if recipe.train_on_prompts:
        kept = [replace(item, prompt=1) for item in kept]
        log(f"data: with their prompts {sum(len(item.tokens) for item in kept)} tokens to train on")

    with on_device(device), progress("train", "steps") as report:
        target = Target(checkpoint, dtype, device, recipe.max_len)
        head = make_head(recipe, target, kept, checkpoint.tokenizer().vocab_size)
        count = sum(parameter.numel() for parameter in head.parameters())
        log(f"head: {recipe.algorithm}, {count / 1e6:.1f} M parameters, for {checkpoint.name} in {type_name(dtype)}")
        settings = asdict(recipe) | {"answers_sha256": described["answers_sha256"], "dtype": type_name(dtype)}
        saved = SavedState(folder, settings)
        history = train(head, target, kept, held_out, recipe, saved, log=log, report=report)
        record = _record(config, recipe, described, history, checkpoint, count)
        works = f"answers are kept in {folder}; the same command with this --out trains again"
        with reporting(lambda: works), files.staged(folder) as stage:
            if beside is None:
                files.write_head(stage, head, dtype)
            else:
                files.write_beside(stage, head, dtype, beside)
            write_json(stage / RECORD, record)
    if history.interrupted:
        done = f"the head as it was after {history.steps} of {recipe.steps} steps is in {folder}"
        raise KeyboardInterrupt(f"{done}; the same command with --out {folder} continues")
    saved.remove()
    return record


def _examples(
    config: EngineConfig,
    source: Source,
    recipe: Recipe,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    folder: Path,
    open_engine: OpenEngine,
    progress: Progress,
    log: Callable[[str], None],
) -> tuple[list[Example], dict[str, Any]]:
    """The answers, and their description for the record."""
    described: dict[str, Any]
    if source.answers is not None:
        examples, header = read_answers(source.answers, checkpoint, recipe.max_len, log)
        examples = examples[: source.limit]
        described = {"answers": str(source.answers), "file_sha256": file_hash(source.answers), "answered": header}
    else:
        assert source.data is not None
        prompts = (read_prompts(source.data, "data", log=log) if source.prompts is None else source.prompts)[
            : source.limit
        ]
        if recipe.held_out >= len(prompts):  # before any of them is answered
            works = f"there are {len(prompts)} prompts and some must be left to train on; use fewer"
            raise refuse("held_out", recipe.held_out, works)
        tokenizer, template = checkpoint.tokenizer(), source.chat_template
        encoded = with_room((prompt.encode(tokenizer, chat_template=template) for prompt in prompts), recipe.max_len)
        params = replace(source.params, seed=config.seed)
        settings = {"chat_template": template, "max_len": recipe.max_len, "dtype": type_name(dtype)}
        header = header_of(checkpoint, encoded, params, **settings)
        kept = partial_answers(folder / ANSWERS, header, encoded, checkpoint.config.vocab_size)
        if kept.path.exists():
            kept.load()
            log(f"answers: {len(kept.rows)} of {len(encoded)} are finished in {kept.path}")
        examples = answer(
            kept,
            encoded,
            params,
            max_len=recipe.max_len,
            open_engine=lambda: open_engine(config),
            progress=lambda: progress("answers", "prompts"),
        )
        described = {
            "data": str(source.data),
            "file_sha256": file_hash(source.data),
            "asked": source.asked,
            "prompts": len(prompts),
            "answered": header,
        }
    tokens = sum(len(item.tokens) - item.prompt for item in examples)
    return examples, described | {
        "answers_used": len(examples),
        "answer_tokens": tokens,
        "answers_sha256": answers_hash(examples),
    }


def _record(
    config: EngineConfig,
    recipe: Recipe,
    data: dict[str, Any],
    history: History,
    checkpoint: Checkpoint,
    parameters: int,
) -> dict[str, Any]:
    return {
        "command": "train-draft",
        "model": config.model,
        "origin": checkpoint.origin,
        "engine": config.as_dict(),
        "recipe": recipe.as_dict(),
        "data": data,
        "parameters": parameters,
        "history": history.as_dict(),
        "versions": versions(),
        "hardware": hardware(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
