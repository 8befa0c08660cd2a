"""What the target answers to the prompts that a draft learns from, kept as token ids in `answers.jsonl`.

A draft is right when it says what the target would, so the answers come from the target, not from the data set. The
file's first line says who answered what, and how; answers are appended as they finish, in any order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbatch.errors import refuse
from specbatch.partial import PartialRows, row_seed
from specbatch.progress import Report
from specbatch.request import Completion, SamplingParams
from specbatch.training.data import LEAST_OUTPUT, Example

if TYPE_CHECKING:
    from specbatch.engine import Engine
    from specbatch.weights import Checkpoint

ANSWERS = "answers.jsonl"
_WEIGHTS = "weights_sha256"
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
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise refuse("answers", str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise refuse("answers", str(path), "is not UTF-8 text; name the answers.jsonl of an earlier run") from error
    header = _header(lines)
    if header is not None:
        _same_model(path, header, target)
        if not lines[-1].endswith("\n"):
            lines.pop()  # a crash cut it short
    rows: dict[int, Example] = {}
    for number, line in list(enumerate(lines, start=1))[header is not None :]:
        try:
            row = json.loads(line)
            prompt, output, place = row["prompt_token_ids"], row["token_ids"], row.get("index", number)
            valid = all(type(token) is int and 0 <= token < target.config.vocab_size for token in (*prompt, *output))
        except (ValueError, TypeError, KeyError):
            valid = False
        if not valid or not prompt or type(place) is not int:
            works = f"a row has prompt_token_ids and token_ids below {target.config.vocab_size}"
            raise refuse("answers", f"{path}:{number}", f"{works}, as train-draft writes them")
        rows[place] = Example((*prompt, *output)[:max_len], len(prompt))
    if header is None:
        log(f"answers: {path} does not say which model answered; taken as those of {target.name}")
    elif len(rows) < header["prompts"]:
        log(f"answers: {len(rows)} of {header['prompts']}, as the run that wrote {path} was cut short")
    return _long_enough(rows), header


def _long_enough(rows: Mapping[int, Example]) -> list[Example]:
    """In the order of the prompts."""
    return [item for _, item in sorted(rows.items()) if len(item.tokens) - item.prompt >= LEAST_OUTPUT]


def _header(lines: Sequence[str]) -> Header | None:
    try:
        first = json.loads(lines[0])
    except (IndexError, ValueError):
        return None
    return first if isinstance(first, dict) and _WEIGHTS in first else None


def _same_model(path: Path, header: Header, target: Checkpoint) -> None:
    """Names and places are no evidence: a model may be moved, and another one put where it was."""
    now = _identity(target)
    if any(header.get(name) != now[name] for name in ("vocabulary", _WEIGHTS)):
        there, here = (
            f"{{model}} ({{origin}}; {{vocabulary}} tokens, weights {{{_WEIGHTS}:.8}})".format_map(who)
            for who in (header, now)
        )
        works = f"{there} answered, and the target is {here}; use that model, or --data to have this one answer"
        raise refuse("answers", str(path), works)


def _identity(target: Checkpoint) -> Header:
    """Of the weights those of the last layer: any training moves them, and the others need not be read."""
    layers = {name: int(found[1]) for name in target.names() if (found := re.search(r"layers\.(\d+)\.", name))}
    last = max(layers.values())
    digest = hashlib.sha256()
    for name in sorted(name for name, layer in layers.items() if layer == last):
        tensor = target.tensor(name).cpu().contiguous()
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return {
        "model": target.name,
        "origin": target.origin,
        "vocabulary": target.config.vocab_size,
        _WEIGHTS: digest.hexdigest(),
    }
