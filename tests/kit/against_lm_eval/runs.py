"""The two sides of a case: lm-eval with its own backend, and specbatch; and their comparison, question by question."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lm_eval
import lm_eval.evaluator
import lm_eval.tasks
import numpy
import pytest
import yaml
from lm_eval.models.huggingface import HFLM

from specbatch import Engine, EngineConfig, Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.several import prepare_several
from specbatch.jobs.questions import bundled_questions

UPSTREAM = Path(lm_eval.__file__).parent / "tasks"
GSM8K = {
    "openai/gsm8k": {"train": "gsm8k_train", "test": "gsm8k"},
    "madrylab/gsm8k-platinum": {"test": "gsm8k_platinum"},
}


PROCESSORS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
}  # of transformers: what each does
ATTRIBUTES = {"repetition_penalty": "penalty"}


@dataclass
class Found:
    """What one side did. The requests are in lm-eval's order: by task, question and repeat, or text.

    prompts   token ids of each request; of a text that is scored, also how many of its last tokens count
    limits    new tokens, stop strings, and how tokens are sampled or penalized
    answers   text of each answer; or log-likelihood of each text, and whether it is the greedy one
    filtered  by task, question and filter: what the filters made of the answers
    metrics   the same: values of the question's metrics
    scores    by task or group, metric and filter: value and standard error
    counts    by task: examples before each question, questions
    """

    prompts: list[Any] = field(default_factory=list)
    limits: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    filtered: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


class Recorded(HFLM):  # type: ignore[misc]
    """lm-eval's backend, which also keeps what it passes to the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found = Found()
        self._made: dict[str, list[tuple[list[int], Any]]] = {}
        self._texts: list[str] = []

    def tok_batch_encode(self, strings: list[str], **kwargs: Any) -> Any:
        self._texts = list(strings)
        return super().tok_batch_encode(strings, **kwargs)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        limits = {"tokens": max_length - context.shape[1], "stop": sorted(set(stop))}
        for text, row, mask in zip(self._texts, context.tolist(), kwargs["attention_mask"].tolist(), strict=True):
            ids = [token for token, counts in zip(row, mask, strict=True) if counts]
            self._made.setdefault(text, []).append((ids, limits))
        processors = self.model._get_logits_processor

        def kept(*args: Any, **kwargs: Any) -> Any:
            found = processors(*args, **kwargs)
            for one in found:
                if (name := PROCESSORS.get(type(one).__name__)) is not None:
                    limits[name] = float(getattr(one, ATTRIBUTES.get(name, name)))
            return found

        self.model._get_logits_processor = kept
        try:
            return super()._model_generate(context, max_length, stop, **kwargs)
        finally:
            del self.model._get_logits_processor

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        answers: list[str] = super().generate_until(requests, disable_tqdm=True)
        for request, answer in zip(requests, answers, strict=True):
            ids, limits = self._made[request.args[0]].pop(0)
            self.found.prompts.append(ids)
            self.found.limits.append(limits)
            self.found.answers.append(answer)
        return answers

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> Any:
        scored = super()._loglikelihood_tokens(requests, **kwargs | {"disable_tqdm": True})
        for (_, context, continuation), answer in zip(requests, scored, strict=True):
            self.found.prompts.append(((context + continuation)[-(self.max_length + 1) :], len(continuation)))
            self.found.answers.append(answer)
        return scored


def _acts(name: str, params: SamplingParams) -> bool:
    """Whether a parameter changes the distribution of the tokens."""
    neutral = getattr(SamplingParams(), name) if name != "temperature" else 1.0
    sampled = params.temperature > 0
    return getattr(params, name) != neutral and (sampled or name == "repetition_penalty")


class Spied:
    """An engine that keeps what it is asked."""

    def __init__(self, engine: Engine, end: str) -> None:
        self._engine, self._end = engine, end
        self.found = Found()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], **kwargs: Any) -> Any:
        for prompt, one in zip(prompts, params, strict=True):
            self.found.prompts.append(list(prompt))
            limits = {"tokens": one.max_new_tokens, "stop": sorted({*one.stop, self._end})}
            limits |= {name: float(getattr(one, name)) for name in PROCESSORS.values() if _acts(name, one)}
            self.found.limits.append(limits)
        return self._engine.generate(prompts, params, **kwargs)

    def score(self, pairs: Sequence[Any], **kwargs: Any) -> Any:
        found = self._engine.score(pairs, **kwargs)
        self.found.prompts += [([*context, *text], len(text)) for context, text in pairs]
        self.found.answers += [tuple(one)[:2] for one in found]
        return found


@contextmanager
def _rows_of_gsm8k() -> Iterator[None]:
    """Without a network `datasets` finds the rows of GSM8K and Platinum."""
    load = datasets.load_dataset

    def found(path: str, *args: Any, **kwargs: Any) -> Any:
        if path not in GSM8K:
            return load(path, *args, **kwargs)
        rows = {split: bundled_questions(name).rows for split, name in GSM8K[path].items()}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in rows.items()})

    datasets.load_dataset = found
    try:
        yield
    finally:
        datasets.load_dataset = load


def theirs(
    folder: Path, tasks: Path, names: Sequence[str], options: Mapping[str, Any], model: Mapping[str, Any]
) -> Found:
    """What lm-eval does. options: of simple_evaluate; model: arguments of its backend; tasks: folder of YAML files."""
    with warnings.catch_warnings(), _rows_of_gsm8k():
        warnings.simplefilter("ignore")
        lm = Recorded(str(folder), **{"device": "cpu", "dtype": "float32", "batch_size": 1} | dict(model))
        _in_results(_simple_evaluate(lm, tasks, names, options), lm.found)
    return lm.found


def as_model(
    folder: Path, tasks: Path, names: Sequence[str], options: Mapping[str, Any], model: Mapping[str, Any]
) -> Found:
    """What lm-eval does with `--model specbatch`: the results, without prompts, limits and answers."""
    import specbatch.cli.lm_eval_model  # noqa: F401 - registers it

    arguments = {"pretrained": str(folder), "device": "cpu", "dtype": "float32", **model}
    found = Found()
    with _rows_of_gsm8k():
        _in_results(_simple_evaluate("specbatch", tasks, names, dict(options) | {"model_args": arguments}), found)
    return found


def _simple_evaluate(lm: Any, tasks: Path, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    shown = [str(tasks), str(tasks.parent / "upstream")]
    manager = lm_eval.tasks.TaskManager(include_path=shown, include_defaults=False)
    # Its description of the machine takes a second, and is not compared.
    with mock.patch.object(lm_eval.evaluator, "add_env_info"):
        found: dict[str, Any] = lm_eval.simple_evaluate(
            lm, tasks=list(names), task_manager=manager, **{"bootstrap_iters": 1000} | dict(options)
        )
    return found


def _in_results(results: dict[str, Any], found: Found) -> None:
    for name, samples in results["samples"].items():
        for sample in sorted(samples, key=lambda one: one["doc_id"]):
            key = f"{name} {sample['doc_id']} {sample['filter']}"
            if isinstance(sample["resps"][0][0], str):  # else a number, which no filter changes
                found.filtered[key] = sample["filtered_resps"]
            found.metrics[key] = {metric: sample[metric] for metric in sample["metrics"] if metric != "bypass"}
        asked = {sample["doc_id"] for sample in samples}
        found.counts[name] = {"examples": results["n-shot"].get(name, 0), "questions": len(asked)}
    for name, scores in {**results.get("groups", {}), **results["results"]}.items():
        for metric, value in scores.items():
            if "," in metric and "_stderr," not in metric and not metric.startswith("bypass"):
                stderr = scores.get(metric.replace(",", "_stderr,"))
                found.scores[f"{name} {metric}"] = (value, stderr if isinstance(stderr, float) else None)


def ours(engine: Engine, tasks: Path, names: Sequence[str], options: Mapping[str, Any]) -> Found:
    """What specbatch does with these options."""
    end = engine.tokenizer.decode([engine.tokenizer.eos_id], skip_special_tokens=False)
    spied = Spied(engine, end)
    wanted = EvalOptions(",".join(names), include_path=(tasks,), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbatch.evals.task._definitions", lambda: tasks.parent / "upstream")
        prepared = prepare_several(wanted)
    for ready in prepared.values():
        start = len(spied.found.answers)
        report = ready.run(spied)  # type: ignore[arg-type]
        _in_report(report, ready.task.first_ids(), start, spied.found)
    return spied.found


def _in_report(report: EvalReport, first: Mapping[str, int], start: int, found: Found) -> None:
    """first: by task, the number of its first question in the report; start: answers before those of the report."""
    found.answers[start:start] = [row["text"] for row in report.questions if "text" in row]  # generated before scored
    for row in report.questions:
        if row.get("repeat", 0):
            continue
        name = row.get("task", report.task)
        shots = report.num_fewshot if isinstance(report.num_fewshot, int) else report.num_fewshot[name]
        found.counts.setdefault(name, {"examples": shots, "questions": 0})["questions"] += 1
        for filter, metrics in row["scores"].items():
            key = f"{name} {row['doc_id'] - first[name]} {filter}"
            found.metrics[key] = metrics
            if "text" in row:
                found.filtered[key] = [row["filtered"][filter]]
    for score in report.scores:
        found.scores[f"{score.task or report.task} {score.metric},{score.filter}"] = (score.value, score.stderr)


def write_tasks(
    folder: Path, tasks: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Sequence[Any]], functions: str
) -> Path:
    """A folder of task files, of the rows that they name, and of functions.py. Beside it are lm-eval's tasks of GSM8K,
    in place of all 14,000."""
    folder.mkdir(parents=True)
    for name in ("gsm8k", "gsm8k_platinum"):
        shutil.copytree(UPSTREAM / name, folder.parent / "upstream" / name)
    (folder / "functions.py").write_text(functions)
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in tasks.items():
        text = yaml.safe_dump(dict(task), sort_keys=False, allow_unicode=True)
        text = re.sub(r"'(!function [\w.]+)'", r"\1", text)
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


def engine_of(folder: Path, speculation: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_running=4,
        speculation=Speculation(**speculation or {}),
        **settings,
    )
    return Engine(config)


def without(found: Found, offset: int) -> Found:
    """What is left of one task without its first questions; no scores and counts."""
    if not offset:
        return found
    filtered, metrics = (
        {key: value for key, value in part.items() if int(key.split()[1]) >= offset}
        for part in (found.filtered, found.metrics)
    )
    return Found(found.prompts[offset:], found.limits[offset:], found.answers[offset:], filtered, metrics)


def differences(one: Found, other: Found, aspects: Sequence[str]) -> dict[str, str]:
    """By aspect: the first difference between both sides."""
    found = {}
    for aspect in aspects:
        if line := _difference(getattr(one, aspect), getattr(other, aspect)):
            found[aspect] = line
    return found


def _difference(one: Any, other: Any, place: str = "") -> str:
    if isinstance(one, numpy.ndarray):
        one, other = one.tolist(), list(other)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{place}: {sorted(one.keys() ^ other.keys())} on one side only"
        return next((line for key in one if (line := _difference(one[key], other[key], f"{place} {key}"))), "")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            if line := _difference(left, right, f"{place}[{index}]"):
                return line
        return "" if len(one) == len(other) else f"{place}: {len(one)} and {len(other)} items"
    if isinstance(one, float) and isinstance(other, float | int):
        same = math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(one) and math.isnan(other))
        return "" if same else f"{place}: {one} and {other}"
    return "" if one == other else f"{place}: {str(one)[:90]!r} and {str(other)[:90]!r}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's logs."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
