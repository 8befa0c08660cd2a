"""The prompts of a check: those that come with the package, a file's, or random token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import MOST, refuse
from specbatch.jobs.prompts import Prompt, read_prompts
from specbatch.servers.engine import HttpEngine
from specbatch.sweeps.check.options import RANDOM_PROMPTS, SAMPLED, CheckOptions
from specbatch.sweeps.workload.description import sha256_of
from specbatch.sweeps.workload.workloads import Workload

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.records.run_record import RunRecord
    from specbatch.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).with_name("prompts.jsonl")


def read(options: CheckOptions, log: Callable[[str], None] | None = None) -> list[Prompt] | None:
    """The rows of the options' prompts; None for random ones. log: called with notes of keys that are not read."""
    if options.random:
        return None
    rows = read_prompts(options.source, log=log or (lambda line: None)) if options.source else read_prompts(BUNDLED)
    if options.sampled:
        if options.source is None:
            by_id = {row.id: row for row in rows}
            rows = [by_id[name] for name in SAMPLED]
        return list(islice(rows, options.prompts or len(SAMPLED)))
    return rows[: options.prompts]


def encode(
    rows: list[Prompt] | None, options: CheckOptions, engine: InferenceEngine | HttpEngine, seed: int
) -> tuple[list[list[int]], list[str | int | None]]:
    """Token ids of the prompts, and their names. Of random prompts, every second one has its first half twice, so that
    there is something to look up. Of the package's prompts those that the engine cannot hold are left out."""
    if rows is None:
        prompts = random_prompts(options, engine.tokenizer, seed)
        return prompts, [None] * len(prompts)
    encoded = [(row.encode(engine.tokenizer, chat_template=options.chat_template), row.id) for row in rows]
    if options.source is None:
        room = engine.caps.get("max_model_len", MOST) - options.max_new_tokens  # a server may not tell
        fitting = [pair for pair in encoded if len(pair[0]) <= room]
        if not fitting:
            least = min(len(ids) for ids, _ in encoded) + options.max_new_tokens
            if isinstance(engine, HttpEngine):
                limit = f"the server takes {engine.caps['max_model_len']} tokens, the shortest prompt needs {least}"
                raise refuse("max_new_tokens", options.max_new_tokens, f"{limit}; use fewer, or a file of your own")
            works = f"the shortest prompt needs {least}; use at least that, a file of your own, or random=True"
            raise refuse("max_model_len", engine.caps["max_model_len"], works)
        encoded = fitting
    return [ids for ids, _ in encoded], [name for _, name in encoded]


def describe(options: CheckOptions, prompts: list[list[int]], seed: int, read: int | None) -> dict[str, Any]:
    """The workload of a record. read: the number of rows, of which some may be left out; None of random prompts."""
    return {
        "command": "check",
        "seed": seed,
        **asdict(options),
        "source": str(options.source) if options.source else None,
        "prompts": len(prompts),
        "prompts_left_out": 0 if read is None else read - len(prompts),
        "prompts_sha256": sha256_of(prompts),
    }


def left_out(record: RunRecord) -> str:
    """What a heading says of prompts that were left out; empty if none were."""
    work = record.workload
    if not (count := work["prompts_left_out"]):
        return ""
    return (
        f"; {count} of {count + work['prompts']} prompts are left out: with {work['max_new_tokens']} tokens of answer "
        f"they are longer than the {record.caps['max_model_len']} tokens of a request"
    )


def random_prompts(options: CheckOptions, tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    workload = Workload(input_len=options.input_len, output_len=options.max_new_tokens, seed=seed)
    prompts = workload.prompts(tokenizer, options.prompts or RANDOM_PROMPTS)
    half = (options.input_len + 1) // 2
    return [(ids[:half] * 2)[: options.input_len] if index % 2 else ids for index, ids in enumerate(prompts)]
