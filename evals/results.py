"""lm-eval's results of an evaluation as scores, and as one row per question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specbatch.evals.finished import Answer
from specbatch.evals.likelihoods import likelihood_fields
from specbatch.evals.task import GENERATING, EvalTask
from specbatch.evals.unparsed import unparsed_share
from specbatch.records.answers import Score
from specbatch.records.metric import Better

BYPASS = "bypass"  # lm-eval's metric of answers that are not scored
_LONG = (
    "itl_s",
    "emitted_histogram",
    "untrimmed_histogram",
    "acceptance",
)  # details that are only in requests.jsonl, at the same index


def scores(task: EvalTask, results: dict[str, Any]) -> Iterator[Score]:
    """The scores of the task; of a group, of its subgroups, and of their tasks, aggregated and weighted by lm-eval."""
    for name in task.groups:
        tasks = {one.task_name for one in task.groups[name].get_all_tasks()}
        yield from _scores_of(task, name, tasks, results.get("groups", {}).get(name, {}), results)
    for name in task.tasks:
        yield from _scores_of(task, name, {name}, results["results"][name], results)


def _scores_of(
    task: EvalTask, name: str, tasks: set[str], found: dict[str, Any], results: dict[str, Any]
) -> Iterator[Score]:
    """The scores in lm-eval's results of a task or group, whose keys are `metric,filter`, with the share of answers in
    which the filter found nothing. tasks: of the group."""
    better = results["higher_is_better"].get(name, {})
    for key, value in found.items():
        metric, comma, filter = key.partition(",")
        if not comma or metric.endswith("_stderr") or metric == BYPASS:
            continue
        rows = [(one, row) for one in tasks for row in results["samples"][one] if row["filter"] == filter]
        missed = unparsed_share([task.tasks[one] for one in tasks], filter)
        stderr = found.get(f"{metric}_stderr,{filter}")
        known = float(stderr) if isinstance(stderr, int | float) else None  # "N/A" for one question
        way: Better = "lower" if better.get(metric) is False else "higher"
        count = sum(metric in row for _, row in rows)
        yield Score(filter, metric, float(value), known, count, missed, way, "" if name == task.name else name)


def verdicts(task: EvalTask, samples: dict[str, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """lm-eval's results by question, in the order of the questions."""
    verdicts: dict[int, dict[str, Any]] = {}
    for name, first in task.first_ids().items():
        for sample in samples[name]:
            if (number := first + sample["doc_id"]) not in verdicts:
                verdicts[number] = {
                    **({"task": name} if task.is_group else {}),
                    "question": str(task.tasks[name].doc_to_text(sample["doc"])),
                    "target": sample["target"],
                    "prompt_hash": sample["prompt_hash"],
                    "filtered": {},
                    "scores": {},
                }
            row = verdicts[number]
            row["filtered"][sample["filter"]] = _filtered(sample)
            row["scores"][sample["filter"]] = {
                metric: sample[metric] for metric in sample["metrics"] if metric != BYPASS
            }
    return verdicts


def answer_rows(verdicts: dict[int, dict[str, Any]], answers: list[Answer]) -> list[dict[str, Any]]:
    """One row per answer, in the order of the questions: lm-eval's results and the metrics of the request."""
    rows = []
    repeats: dict[int, int] = {}
    for doc_id, _, completion in answers:
        repeat = repeats[doc_id] = repeats.get(doc_id, -1) + 1
        answer: dict[str, Any] = {"text": completion.text}
        if completion.token_ids or not completion.text:  # a server gives no tokens
            answer["token_ids"] = completion.token_ids
        if completion.reasoning is not None:
            answer["reasoning"] = completion.reasoning
        numbers = {name: value for name, value in completion.as_row().items() if name not in _LONG}
        rows.append({"doc_id": doc_id, "repeat": repeat, **verdicts[doc_id], **answer, **numbers})
    return rows


def scored_rows(
    task: EvalTask, verdicts: dict[int, dict[str, Any]], samples: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One row per question: lm-eval's results and the log-likelihoods of its texts."""
    likelihoods = {
        first + sample["doc_id"]: likelihood_fields(task.tasks[name], sample)
        for name, first in task.first_ids().items()
        if task.tasks[name].OUTPUT_TYPE != GENERATING
        for sample in samples[name]
    }
    return [
        {"doc_id": doc_id} | {name: value for name, value in verdicts[doc_id].items() if name != "filtered"} | own
        for doc_id, own in likelihoods.items()
    ]


def _filtered(sample: dict[str, Any]) -> Any:
    return sample["filtered_resps"][0]
