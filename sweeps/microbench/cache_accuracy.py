"""Accuracy of FP8 KV caches on real weights beside the model's dtype: retrieval and perplexity at length, and GSM8K.

Retrieval: a text of source files of Python's standard library has lines with codes at several depths, and the model
completes a line with one of them. Right is the exact code. Perplexity is that of the 512 tokens after such a text.
GSM8K: the first questions, raw, with the first five rows of the training set, greedy, the number after "####". All
caches get the same tokens. Intervals are 95%: Wilson's of shares, and of mean differences of log-probabilities.

"fp8, scale 1" is a checkpoint that brings these scales: the same weights with `k_scale` and `v_scale` of 1.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import torch
import typer
from scipy.stats import binomtest

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.config.values import names
from specbatch.errors import refuse
from specbatch.jobs.questions import bundled_questions
from specbatch.sweeps.microbench.runner import Row, Table, counts
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights import open_checkpoint
from specbatch.weights.folder import FolderCheckpoint

_SCORED, _ROOM = 512, 64  # tokens of which the perplexity is taken, and room for a question and its answer
_PART = 64  # tokens that are scored at once, for the interval
_NAMES = ("amber", "cobalt", "crimson", "golden", "ivory", "jade", "scarlet", "silver", "teal", "violet")
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


class Document(NamedTuple):
    """A text of `length` tokens less the rest, the questions after it with their codes, and the tokens after it."""

    length: int
    tokens: list[int]
    questions: list[tuple[list[int], str]]
    following: list[int]


class Found(NamedTuple):
    """right: by length, per question; logprobs: by length, of each part; solved: GSM8K, per question."""

    right: dict[int, list[bool]]
    logprobs: dict[int, list[float]]
    solved: list[bool]


SETS = {"max_model_len": ("lengths",)}
_CACHES = ("model", "fp8-scale-1", "fp8")


def tables(
    model: Annotated[str, typer.Option(help="Bundled name, .gguf file or folder.")] = "smollm2-135m",
    lengths: Annotated[str, typer.Option(help="Tokens of the texts.")] = "4096,8192,16384,32768",
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 4,
    depths: Annotated[int, typer.Option(min=1, max=len(_NAMES), help="Lines to find in each text.")] = 10,
    questions: Annotated[int, typer.Option(min=0, help="Questions of GSM8K.")] = 200,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "bfloat16",
    caches: Annotated[str, typer.Option(help=f"Some of {', '.join(_CACHES)}.")] = ",".join(_CACHES),
) -> Iterator[Table]:
    sizes, chosen = counts("lengths", lengths), names("caches", caches)
    if not set(chosen) <= set(_CACHES):
        raise refuse("caches", caches, f"use some of {', '.join(_CACHES)}, with commas")
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(model)
        if not isinstance(checkpoint, FolderCheckpoint):
            raise refuse("model", model, "has no weights; use a bundled name, a .gguf file or a folder")
        documents = [one for size in sizes for one in _documents(checkpoint.tokenizer(), size, texts, depths)]
        _with_scales_of_one(checkpoint, Path(folder))
        engines = {
            "model": EngineConfig(model=model, kv_dtype="model"),
            "fp8-scale-1": EngineConfig(model=folder, tokenizer=model, kv_dtype="fp8"),
            "fp8": EngineConfig(model=model, kv_dtype="fp8"),
        }
        found = {
            name: _measure(_config(engines[name], max(sizes), dtype, questions), documents, questions)
            for name in chosen
        }
    yield Table(_rows(found), f"{model}, {dtype}")


def _config(base: EngineConfig, longest: int, dtype: str, questions: int) -> EngineConfig:
    running = min(max(questions, len(_NAMES)), 128)
    length = max(longest, 1536 if questions else 0)
    return replace(base, dtype=dtype, max_model_len=length, max_running=running, prefill_chunk=8192)


def _measure(config: EngineConfig, documents: list[Document], questions: int) -> Found:
    with Engine(config) as engine:
        right: dict[int, list[bool]] = {}
        logprobs: dict[int, list[float]] = {}
        for one in documents:
            starts = range(0, len(one.following), _PART)
            pairs = [(one.tokens + one.following[:start], one.following[start : start + _PART]) for start in starts]
            logprobs.setdefault(one.length, []).extend(score.logprob for score in engine.score(pairs))
            prompts = [one.tokens + question for question, _ in one.questions]
            done = engine.generate(prompts[:1], SamplingParams(max_new_tokens=12))  # the others share its prefix
            done += engine.generate(prompts[1:], SamplingParams(max_new_tokens=12))
            codes = (code for _, code in one.questions)
            hits = [item.text.strip().startswith(code) for item, code in zip(done, codes, strict=True)]
            right.setdefault(one.length, []).extend(hits)
        solved = _solved(engine, questions)
    gc.collect()
    torch.cuda.empty_cache()
    return Found(right, logprobs, solved)


def _documents(tokenizer: Tokenizer, length: int, count: int, depths: int) -> Iterator[Document]:
    """Source files in the order of their names, each text from another one on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for number in range(count):
        first, text = number * len(files) // count, ""
        for file in files[first:] + files[:first]:
            text += file.read_text(encoding="utf-8", errors="replace")
            if len(text) > 12 * length:
                break
        stems = [f"\n# The access code of the {name} door is" for name in _NAMES[:depths]]
        codes = [str(10_000 + (7919 * (length + 100 * number + place)) % 90_000) for place in range(depths)]
        lines = [
            tokenizer.encode(f"{stem} {code}.\n", add_special_tokens=False)
            for stem, code in zip(stems, codes, strict=True)
        ]
        size = length - _SCORED - _ROOM - sum(map(len, lines))
        tokens, body = tokenizer.encode(text), list[int]()
        bounds = [0, *(size * (2 * place + 1) // (2 * depths) for place in range(depths))]
        for (start, end), line in zip(pairwise(bounds), lines, strict=True):
            body += tokens[start:end] + line
        body += tokens[bounds[-1] : size]
        questions = [tokenizer.encode(stem, add_special_tokens=False) for stem in stems]
        yield Document(length, body, [*zip(questions, codes, strict=True)], tokens[size:][:_SCORED])


def _solved(engine: Engine, count: int) -> list[bool]:
    shots = bundled_questions("gsm8k_train").rows[:5]
    head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shots)
    rows = bundled_questions("gsm8k").rows[:count]
    params = SamplingParams(max_new_tokens=256, stop=("Question:",))
    done = engine.generate([f"{head}Question: {row['question']}\nAnswer:" for row in rows], params) if rows else []
    return [_number(item.text) == _number(row["answer"]) for item, row in zip(done, rows, strict=True)]


def _number(text: str) -> str | None:
    found = _ANSWER.search(text)
    return None if found is None else found[1].replace(",", "").rstrip(".")


def _with_scales_of_one(checkpoint: FolderCheckpoint, folder: Path) -> None:
    """Links to the files of a checkpoint, and scales beside them."""
    from safetensors.torch import save_file

    sources = sorted(checkpoint.folder.glob("*.safetensors"))
    index = checkpoint.folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    places = places or dict.fromkeys(checkpoint.names(), sources[0].name)
    for source in (*sources, checkpoint.folder / "config.json"):
        (folder / source.name).symlink_to(source.resolve())
    layers = range(checkpoint.config.num_layers)
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1) for layer in layers for part in "kv"}
    save_file(scales, folder / "scales.safetensors")
    places |= dict.fromkeys(scales, "scales.safetensors")
    (folder / index.name).write_text(json.dumps({"weight_map": places}))


def _rows(found: dict[str, Found]) -> Iterator[Row]:
    base = next(iter(found.values()))
    for name, one in found.items():
        row: Row = {"KV cache": name.replace("-", " ", 1).replace("-", " ")}
        for length, right in one.right.items():
            row[f"line of {length:,}"] = _share(right)
        for length, logprobs in one.logprobs.items():
            row[f"perplexity at {length:,}"] = _perplexity(logprobs, base.logprobs[length])
        if one.solved:
            changed = sum(a != b for a, b in zip(one.solved, base.solved, strict=True))
            row["GSM8K"] = _share(one.solved) + (f", {changed} changed" if one is not base else "")
        yield row


def _share(right: Sequence[bool]) -> str:
    found = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    return f"{sum(right)}/{len(right)} ({found.low:.2f}-{found.high:.2f})"


def _perplexity(logprobs: list[float], base: list[float]) -> str:
    text = f"{math.exp(-mean(logprobs) / _PART):.3f}"
    if logprobs == base:
        return text
    ratios = [(b - a) / _PART for a, b in zip(logprobs, base, strict=True)]
    slack = 1.96 * stdev(ratios) / math.sqrt(len(ratios))
    low, middle, high = (math.exp(mean(ratios) + shift) for shift in (-slack, 0.0, slack))
    return f"{text}, x {middle:.4f} ({low:.4f}-{high:.4f})"
