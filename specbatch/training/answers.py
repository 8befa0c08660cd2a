"""What the target answers to the prompts that a draft learns from, kept as token ids in `answers.jsonl`.

A draft is right when it says what the target would, so the answers come from the target, not from the data set. The
file's first line says who answered what, and how; answers are appended as they finish, in any order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbatch.core.request import Completion, SamplingParams
from specbatch.errors import refuse
from specbatch.jobs.partial_output import PartialRows, Row, parsed, row_seed
from specbatch.progress import Report
from specbatch.records.differences import describe_differences
from specbatch.training.data import LEAST_OUTPUT, Example

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine
    from specbatch.weights import Checkpoint

ANSWERS = "answers.jsonl"
_WEIGHTS = "weights_sha256"
_TOLD = ("model", "origin")  # names and places are no evidence: a model may be moved, and another one put where it was
Header = dict[str, Any]


def header_of(target: Checkpoint, prompts: Sequence[list[int]], params: SamplingParams, **settings: Any) -> Header:
    """Who answers, what and how: everything that the tokens follow from. settings: other choices of the user."""
    return {
        **_identity(target),
        **settings,
        "sampling": {name: getattr(params, name) for name in ("temperature", "top_p", "max_new_tokens", "seed")},
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


def with_room(prompts: Iterable[list[int]], max_len: int) -> list[list[int]]:
    """The prompts (token ids) that leave room for an answer in `max_len` tokens."""
    fitting = [tokens for tokens in prompts if len(tokens) + LEAST_OUTPUT <= max_len]
    if not fitting:
        raise refuse("max_len", max_len, "no prompt of the data leaves room for an answer; raise it")
    return fitting


def partial_answers(path: Path, header: Header, prompts: Sequence[list[int]], vocabulary: int) -> PartialRows:
    """Answers to these prompts, of which an earlier run may have left some in `path`. vocabulary: of the model."""

    def is_row(row: Row) -> bool:
        return _is_answer(row, len(prompts), vocabulary) and row["prompt_token_ids"] == prompts[row["index"]]

    return PartialRows(path, header, is_row, start_over="remove it", may_differ=_TOLD)


def answer(
    kept: PartialRows,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    max_len: int,
    open_engine: Callable[[], AbstractContextManager[Engine]],
    progress: Callable[[], AbstractContextManager[Report]],
) -> list[Example]:
    """An answer to every prompt, up to `max_len` tokens with it: those that `kept` holds, and the engine's to the
    others, written to its file as they end. params: with a seed.

    Returns those long enough to draft in, in the order of the prompts. An interruption leaves what is finished.
    """
    assert params.seed is not None
    missing = [index for index in range(len(prompts)) if index not in kept.rows]
    if missing:
        limits = [min(params.max_new_tokens, max_len - len(prompts[index])) for index in missing]
        settings = [
            replace(params, max_new_tokens=limit, seed=row_seed(params.seed, index))
            for index, limit in zip(missing, limits, strict=True)
        ]
        with open_engine() as engine, kept.claim() as keep, progress() as report:

            def finish(completion: Completion) -> None:
                if completion.finish_reason == "abort":
                    return
                index = missing[completion.index]
                keep({"index": index, "prompt_token_ids": prompts[index], "token_ids": completion.token_ids})
                report(len(kept.rows), len(prompts))

            try:
                engine.generate([prompts[index] for index in missing], settings, on_completion=finish)
            except KeyboardInterrupt:
                done = f"kept {len(kept.rows)} finished of {len(prompts)} answers"
                works = f"the same command with --out {kept.path.parent} continues"
                raise KeyboardInterrupt(f"{done} in {kept.path}; {works}") from None
    answers = {
        index: Example((*row["prompt_token_ids"], *row["token_ids"]), len(row["prompt_token_ids"]))
        for index, row in kept.rows.items()
    }
    return _long_enough(answers)


def read_answers(
    path: Path, target: Checkpoint, max_len: int, log: Callable[[str], None]
) -> tuple[list[Example], Header | None]:
    """What `answer` wrote, cut to `max_len` tokens, and the file's header, None where an older file has none; `log` is
    told of that.

    Refused: a line that is no such row, with its number; the answers of another model than `target`.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise refuse("answers", str(path), f"cannot be read ({error.strerror})") from error
    header = _header(lines[0])
    if header is not None:
        _same_model(path, header, target)
    if header is not None or not lines[-1]:
        lines.pop()  # empty, or a crash cut it short
    rows: dict[int, Example] = {}
    count = math.inf if header is None else header["prompts"]
    for number, line in list(enumerate(lines, start=1))[header is not None :]:
        row = parsed(line)
        if header is None and isinstance(row, dict):
            row = {"index": number} | row
        if not _is_answer(row, count, target.config.vocab_size):
            index = "" if header is None else f"an index below {count}, "
            works = f"a row has {index}prompt_token_ids and token_ids below {target.config.vocab_size}"
            raise refuse("answers", f"{path}:{number}", f"{works}, as train-draft writes them")
        prompt = row["prompt_token_ids"]
        rows[row["index"]] = Example((*prompt, *row["token_ids"])[:max_len], len(prompt))
    if header is None:
        log(f"answers: {path} does not say which model answered; taken as those of {target.name}")
    elif len(rows) < count:
        log(f"answers: {len(rows)} of {count}, as the run that wrote {path} was cut short")
    return _long_enough(rows), header


def _long_enough(rows: Mapping[int, Example]) -> list[Example]:
    """In the order of the prompts."""
    return [item for _, item in sorted(rows.items()) if len(item.tokens) - item.prompt >= LEAST_OUTPUT]


def _is_answer(row: Any, prompts: float, vocabulary: int) -> bool:
    """To one of so many prompts, in tokens of a vocabulary of that size."""
    if not isinstance(row, dict) or type(row.get("index")) is not int or not 0 <= row["index"] < prompts:
        return False
    texts = [row.get(name) for name in ("prompt_token_ids", "token_ids")]
    return bool(texts[0]) and all(
        isinstance(text, list) and all(type(token) is int and 0 <= token < vocabulary for token in text)
        for text in texts
    )


def _header(line: bytes) -> Header | None:
    first = parsed(line)
    return first if isinstance(first, dict) and _WEIGHTS in first else None


def _same_model(path: Path, header: Header, target: Checkpoint) -> None:
    now = _identity(target)
    if not now.keys() <= header.keys() or type(header.get("prompts")) is not int:
        works = "the header lacks what train-draft writes; name the answers.jsonl of an earlier run"
        raise refuse("answers", f"{path}:1", works)
    differs = [name for name in now if name not in _TOLD and header[name] != now[name]]
    if differs:
        there, here = ("{model} ({origin})".format_map(who) for who in (header, now))
        works = f"{there} answered, and the target is {here}, with another {describe_differences(header, now, differs)}"
        raise refuse("answers", str(path), f"{works}; use that model, or --data to have this one answer")


def _identity(target: Checkpoint) -> Header:
    """Who answers: everything of the model, and of the tokenizer's choices, that answers follow from."""
    config = asdict(target.config)
    del config["mtp_layers"], config["rope"]["source"]  # a head beside the model, and how its theta was spelled
    tokenizer = target.tokenizer()
    described = {
        "model": target.name,
        "origin": target.origin,
        "vocabulary": target.config.vocab_size,
        "vocabulary_sha256": hashlib.sha256(json.dumps(tokenizer.vocabulary()).encode()).hexdigest(),
        "end_tokens": sorted(tokenizer.eos_ids),
        "config": config,
        _WEIGHTS: _weights_hash(target),
    }
    found: Header = json.loads(json.dumps(described, default=sorted))  # of sets
    return found


def _weights_hash(target: Checkpoint) -> str:
    """Of a sample of every tensor that holds a value of each row, as any training and any merge moves rows; all of a
    vector. Reading all values of a large model would take longer than opening it."""
    digest = hashlib.sha256()
    for name in sorted(target.names()):
        tensor = target.tensor(name)
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        step = max(1, tensor.shape[-1] - 1) if tensor.dim() > 1 else 1  # less than a row: the column moves on
        sample = tensor.reshape(-1)[::step].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
