"""Reads the results of another engine that lm-eval has written: `results_DATE.json` and `samples_TASK_DATE.jsonl`.

Answers have hashes of their prompts from lm-eval 0.4.3 on, and name their filter from 0.4.7 on. Nothing is known of
times and of drafts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeGuard

from pydantic import Field

from specbatch.errors import counted, refuse
from specbatch.files.text_files import read_json
from specbatch.records.answers import GENERATES, EvalAnswers, Score
from specbatch.records.metric import Better
from specbatch.records.run_record import RunRecord
from specbatch.records.schema import Count, Table
from specbatch.records.store import RECORD
from specbatch.records.validation import checked, read_rows

_DATED = re.compile(r".*_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?)\.json")
_WORKS = "name the folder of a run of lm-eval with --log_samples, of version 0.4.7 or later"
_UNSCORED = "bypass"  # the metric of --predict_only
_MOST = 1e15  # of a number; also false for NaN
_SHOWN = 5  # names in a message


class _SampleCount(Table):
    original: Count
    effective: Count


class LmEvalResults(Table):
    """results_DATE.json of lm-eval."""

    results: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]]
    sizes: dict[str, _SampleCount] = Field(alias="n-samples", min_length=1)
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None] | None] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    model_name: str | None = None
    model_source: str | None = None
    lm_eval_version: str = "of an unknown version"


class LmEvalSample(Table):
    """A line of samples_TASK_DATE.jsonl of lm-eval. Before version 0.4.7 it has neither filter nor metrics."""

    doc_id: Count
    prompt_hash: str
    filter: str | None = None
    metrics: list[str] | None = None


@dataclass(frozen=True)
class ResultsFile:
    """One results file. setting: what the user calls it."""

    setting: str
    path: Path

    @classmethod
    def find(cls, setting: str, path: Path) -> Self | None:
        """The results file that `path` is, or the newest one in the folder `path`; None if there is none, and for a
        folder with records of this package. Refused: results of several models."""
        if path.is_file():
            return cls(setting, path) if path.suffix == ".json" else None
        if not path.is_dir() or any(path.rglob(RECORD)):
            return None
        found = {file: match[1] for file in path.rglob("*.json") if (match := _DATED.fullmatch(file.name))}
        folders = sorted({str(file.parent.relative_to(path)) for file in found})
        if len(folders) > 1:
            raise refuse(setting, str(path), f"holds results of lm-eval in {_listed(folders)}; name one of them")
        return cls(setting, max(found, key=found.__getitem__)) if found else None

    @cached_property
    def _body(self) -> LmEvalResults:
        return checked(self.setting, str(self.path), LmEvalResults, read_json(self.setting, self.path, _WORKS), _WORKS)

    @property
    def tasks(self) -> list[str]:
        """The evaluated tasks and groups: those that are no part of another one."""
        parts = {part for group in self._body.group_subtasks.values() for part in group}
        return [name for name in dict.fromkeys((*self._body.group_subtasks, *self._body.sizes)) if name not in parts]

    def records(self) -> dict[str, RunRecord]:
        """What is known of the run, as one record per evaluated task."""
        found = {}
        for task in self.tasks:
            found[task] = RunRecord(
                config=self._config(),
                caps={},
                metrics={"requests": sum(self._body.sizes[part].effective for part in self._parts(task))},
                counters={},
                requests=[],
                workload={"command": "lm_eval", "task": task},
                versions={"lm_eval": self._body.lm_eval_version},
                hardware={},
                provenance={},
            )
        return found

    def answers(self, task: str) -> EvalAnswers:
        """Scores and answers of an evaluated task or group.

        Refused: answers that are missing, given twice, or without what names their prompt and filter.
        """
        questions: dict[int, dict[str, Any]] = {}
        first = self._first_ids(task)
        counts: dict[tuple[str, str], int] = {}
        for part in self._parts(task):
            for row in self._samples(part):
                number = first[part] + row["doc_id"]
                known = questions.setdefault(
                    number, {"doc_id": number, "prompt_hash": row["prompt_hash"], "scores": {}}
                )
                filter = row["filter"]
                if filter in known["scores"]:
                    works = f"has the answer to question {row['doc_id']} twice under the filter {filter}; {_WORKS}"
                    raise refuse(self.setting, str(self._samples_path(part)), works)
                known["scores"][filter] = {metric: row.get(metric) for metric in row["metrics"]}
                for metric in row["metrics"]:
                    counts[filter, metric] = counts.get((filter, metric), 0) + 1
        rows = [questions[number] for number in sorted(questions)]
        record = self.records()[task]
        record.metrics["requests"] = len(rows)
        kinds = (str(self._body.configs.get(part, {}).get("output_type", GENERATES)) for part in self._parts(task))
        kind = ", ".join(dict.fromkeys(kinds))
        scores = list(self._scores(task, counts))
        return EvalAnswers(task=task, scores=scores, questions=rows, record=record, kind=kind)

    def _config(self) -> dict[str, Any]:
        """As much of the engine's configuration as records have."""
        body = self._body
        arguments = body.config.get("model_args")
        return {
            "model": body.model_name or "unknown",
            "engine": body.model_source or str(body.config.get("model", "unknown")),
            "load_format": "auto",
            "speculation": {"algorithm": "none"},
            "graphs": {},
            **({"model_args": arguments} if isinstance(arguments, dict) else {}),
        }

    def _parts(self, task: str) -> list[str]:
        """The tasks of a group in lm-eval's order; a task itself."""
        every, left = set[str](), [task]
        for name in left:
            if name not in every:
                every.add(name)
                left += self._body.group_subtasks.get(name, [])
        parts = [name for name in self._body.sizes if name in every]
        if not parts:
            raise refuse(self.setting, str(self.path), f"has no number of questions for {task}; {_WORKS}")
        return parts

    def _first_ids(self, task: str) -> dict[str, int]:
        """By task of a group: the number of its first question among those of the group."""
        parts = self._parts(task)
        return dict(zip(parts, accumulate((self._body.sizes[one].original for one in parts), initial=0), strict=False))

    def _scores(self, task: str, counts: Mapping[tuple[str, str], int]) -> Iterator[Score]:
        found = self._body.results.get(task, {})
        ways = self._body.higher_is_better.get(task) or {}
        for key, value in found.items():
            metric, comma, filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or metric == _UNSCORED or not _is_number(value):
                continue
            stderr = found.get(f"{metric}_stderr,{filter}")
            way: Better = "lower" if ways.get(metric) is False else "higher"
            known = float(stderr) if _is_number(stderr) else None
            yield Score(filter, metric, float(value), known, counts.get((filter, metric), 0), None, way)

    def _samples_path(self, task: str) -> Path:
        match = _DATED.fullmatch(self.path.name)
        date = "DATE" if match is None else match[1]
        return self.path.parent / f"samples_{task.replace('/', '__')}_{date}.jsonl"

    def _samples(self, task: str) -> list[dict[str, Any]]:
        """The rows of a task; those of an older lm-eval with their filter and metrics."""
        path = self._samples_path(task)
        if not path.is_file():
            works = "is not there: answers are compared question by question, so run lm-eval with --log_samples"
            raise refuse(self.setting, str(path), works)
        rows = list(read_rows(self.setting, path, LmEvalSample, _WORKS))
        result = self._body.results.get(task, {})
        asked = result.get("sample_len")  # lm-eval 0.4.11 does not write it
        if len(found := {row["doc_id"] for row in rows}) < (asked if type(asked) is int and asked < _MOST else 1):
            raise refuse(self.setting, str(path), f"has {counted(len(found), 'answer')} of {asked}; {_WORKS}")
        keys = [key.partition(",") for key in result if "," in key and "_stderr," not in key]
        filters = list(dict.fromkeys(filter for *_, filter in keys))
        for row in rows:
            if row.get("filter") is None and len(filters) != 1:
                works = f"was written by lm-eval {self._body.lm_eval_version}, and its answers name no filter; {_WORKS}"
                raise refuse(self.setting, str(path), works)
            row["filter"] = row.get("filter") or filters[0]
            row["metrics"] = row.get("metrics") or [metric for metric, *_ in keys if metric in row]
        return rows


def _is_number(value: Any) -> TypeGuard[float]:
    """A score; "N/A", or a blank where lm-eval computed none, is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
