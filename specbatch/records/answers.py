"""The answers of an evaluation on disk: scores and one row per question, beside the record of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from specbatch.errors import SpecbatchError, counted, refuse
from specbatch.records.metric import Better
from specbatch.records.run_record import RunRecord
from specbatch.records.schema import Amount, Count, Number, Sampling, Table
from specbatch.records.store import RECORD, WORKS, load_record
from specbatch.records.validation import checked, read_rows

QUESTIONS = "questions.jsonl"
GENERATES = "generate_until"  # lm-eval's output type of tasks that generate answers


class ScoreTable(Table):
    model_config = ConfigDict(extra="forbid")

    filter: str
    metric: str
    value: Number
    stderr: Amount | None
    n: Count
    unparsed: Annotated[float, Field(ge=0, le=1)] | None
    better: Literal["higher", "lower"] = "higher"
    task: str = ""


class AnswersTable(Table):
    """The workload of a record of `eval`."""

    task: str
    kind: str = "generate_until"
    sampling: Sampling | None = None
    scores: list[ScoreTable]  # none of answers that were not scored


class Question(Table):
    """A line of questions.jsonl."""

    doc_id: Count
    prompt_hash: str
    scores: dict[str, dict[str, Any]]


class AnsweredQuestion(Question):
    """Of a task that generates answers."""

    finish_reason: str


@dataclass(frozen=True)
class Score:
    """One metric under one answer filter.

    stderr is None for a single question and where lm-eval computes none; unparsed, the share of answers in which the
    filter found nothing, is None where the filter cannot fail. task: the part of an evaluated group that the score is
    of; "" for the evaluated task or group itself.
    """

    filter: str
    metric: str
    value: float
    stderr: float | None
    n: int
    unparsed: float | None
    better: Better = "higher"
    task: str = ""


@dataclass(frozen=True, kw_only=True)
class EvalAnswers:
    """Scores and answers of one evaluation.

    kind        lm-eval's output type; of a group with several, all of them, separated by commas
    questions   one row per answer, with at least doc_id, prompt_hash, finish_reason (of generated answers) and scores
                by filter and metric
    record      the record of the run
    """

    task: str
    scores: list[Score]
    questions: list[dict[str, Any]]
    record: RunRecord
    kind: str = GENERATES

    @property
    def overall(self) -> list[Score]:
        """The scores of the evaluated task or group itself: none for a tag, whose tasks lm-eval does not aggregate."""
        return [score for score in self.scores if not score.task]

    @property
    def generates(self) -> bool:
        """Whether some task generates answers; in a group others may not."""
        return GENERATES in self.kind.split(", ")

    @property
    def scores_texts(self) -> bool:
        """Whether some task scores given texts."""
        return self.kind != GENERATES

    @property
    def finish_reasons(self) -> dict[str, int]:
        return dict(Counter(row["finish_reason"] for row in self.questions if "finish_reason" in row))

    @property
    def truncated(self) -> float:
        """Share of the answers that reached max_new_tokens. They are scored as they stand."""
        reasons = self.finish_reasons
        return reasons.get("length", 0) / sum(reasons.values())

    @classmethod
    def load(cls, folder: Path, setting: str = "folder") -> Self:
        """What an evaluation wrote into `folder`, the value of `setting`."""
        record = load_record(setting, folder)
        checked(setting, str(folder / RECORD), AnswersTable, record.workload, WORKS)
        settings = {item.name: record.workload[item.name] for item in fields(cls) if item.name in record.workload}
        settings["scores"] = [Score(**score) for score in settings["scores"]]
        generates = settings.get("kind", GENERATES) == GENERATES
        row = AnsweredQuestion if generates else Question
        questions = list(read_rows(setting, folder / QUESTIONS, row, WORKS))
        if not questions:
            raise refuse(setting, str(folder / QUESTIONS), f"holds no answers; {WORKS}")
        return cls(**settings, questions=questions, record=record)


def is_evaluated(folder: Path) -> bool:
    """Whether the points of a sweep's folder are evaluations: `eval` in several configurations wrote it."""
    return any(folder.glob(f"*/c*/r*/{QUESTIONS}"))


def load_answers(setting: str, folder: Path, run: Path | None = None, files: Path | None = None) -> EvalAnswers | None:
    """The answers in `folder`; None where another command than eval wrote it.

    run, files: a run that holds `folder`, and where its files are (`specbatch.records.archive.unpacked`).
    """
    if run is not None and files is not None and folder.is_relative_to(run):
        folder = files / folder.relative_to(run)
    return EvalAnswers.load(folder, setting) if (folder / QUESTIONS).is_file() else None


def unpaired(questions: Sequence[int]) -> SpecbatchError:
    """The error for runs of which these questions have another prompt or are in one only."""
    others = len(set(questions)) - 1
    more = f" and {counted(others, 'other')}" if others else ""
    return SpecbatchError(
        f"the answers cannot be paired: the prompt of question {questions[0]}{more} differs or is missing in one run"
    )
