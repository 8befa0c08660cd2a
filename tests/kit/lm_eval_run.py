"""Files of another engine, as lm-eval writes them: a results file, and samples of each task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATE = "2026-01-02T03-04-05.678901"


def samples_of(scores: Sequence[float], filter: str = "none", metric: str = "acc") -> list[dict[str, Any]]:
    """A row per question, 0, 1, ..., whose prompt is its number."""
    return [
        {"doc_id": number, "prompt_hash": f"prompt {number}", "filter": filter, "metrics": [metric], metric: score}
        for number, score in enumerate(scores)
    ]


def write_run(
    folder: Path, tasks: Mapping[str, list[dict[str, Any]]], *, date: str = DATE, engine: str = "hf", **more: Any
) -> Path:
    """The results file. more: other contents of it, by key."""
    folder.mkdir(parents=True, exist_ok=True)
    results, sizes = {}, {}
    for task, rows in tasks.items():
        found: dict[str, Any] = {"name": task, "alias": task, "sample_len": len({row["doc_id"] for row in rows})}
        for row in rows:
            for metric in row.get("metrics", []):
                of_metric = [one[metric] for one in rows if one["filter"] == row["filter"]]
                if all(isinstance(value, int | float) for value in of_metric):
                    found[f"{metric},{row['filter']}"] = sum(of_metric) / len(of_metric)
                    found[f"{metric}_stderr,{row['filter']}"] = "N/A"
        results[task] = found
        sizes[task] = {"original": found["sample_len"], "effective": found["sample_len"]}
        (folder / f"samples_{task}_{date}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {
        "results": results, "group_subtasks": {}, "configs": {task: {"task": task} for task in tasks},
        "higher_is_better": {}, "n-samples": sizes, "config": {"model": engine, "model_args": {"pretrained": "org/m"}},
        "model_source": engine, "model_name": "org/m", "lm_eval_version": "0.4.13",
    }  # fmt: skip
    path = folder / f"results_{date}.json"
    path.write_text(json.dumps(body | more))
    return path
