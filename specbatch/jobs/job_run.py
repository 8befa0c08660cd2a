"""One run of a batch job: feeds the missing rows to the engine, and keeps each one that finishes, until a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import tee
from typing import TYPE_CHECKING

from specbatch.core.completion import Completion
from specbatch.errors import SpecbatchError
from specbatch.jobs.formats import BadRow, JobRow, Request
from specbatch.jobs.input_scan import SECONDS_BETWEEN_REPORTS, SHOWN
from specbatch.jobs.job_settings import Limits
from specbatch.jobs.missing_rows import MissingRows
from specbatch.jobs.partial_output import Row
from specbatch.jobs.prompt_file import location
from specbatch.progress.bars import NotedReport, Speed

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

Keep = Callable[[Row], None]


class JobRun:
    """A run of a job. keep: stores a finished row."""

    def __init__(
        self, rows: MissingRows, engine: InferenceEngine, keep: Keep, limits: Limits, report: NotedReport | None
    ) -> None:
        self._rows, self._engine, self._keep, self._limits, self._report = rows, engine, keep, limits, report
        self._speed = Speed()
        self._reported = 0.0
        self._tokens = 0
        self._logged = 0
        self._stopped: str | None = None
        self._waiting: dict[int, _Waiting] = {}  # by number of the request in the stream

    def run(self, concurrency: int | None) -> str | None:
        """Returns the limit that ended the run, if rows are missing."""
        prompts, params = tee(self._requests())
        stream = self._engine.stream(
            (tokens for tokens, _ in prompts), (own for _, own in params), concurrency=concurrency, text=False
        )
        with closing(stream) as events:
            for event in events:
                self._tokens += len(event.token_ids)
                self._speed.add(event.index, len(event.token_ids), ended=event.completion is not None)
                if event.completion is not None and event.completion.finish_reason != "abort":
                    self._finish(event.index, event.completion)
                self._show()
                if self._limits.deadline is not None and time.monotonic() > self._limits.deadline:
                    self._stopped = "--time-limit"
                    break
        self._show(last=True)
        return self._stopped if len(self._rows.finished) < self._rows.found.rows else None

    def _requests(self) -> Iterator[Request]:
        """The requests of the missing rows, in order."""
        rows, number = self._rows, 0
        for row in rows.read(self._engine):
            if self._limits.max_tokens_total is not None and self._tokens >= self._limits.max_tokens_total:
                self._stopped = "--max-tokens-total"
                return
            try:
                requests = rows.requests_of(row, self._engine)
            except SpecbatchError as error:  # also of a chat template that exceeds a limit only this time
                if rows.skip_bad and not rows.form.keeps_bad_rows:
                    rows.leave_out(row.index)
                    self._log("skipped", row, str(error))
                    continue
                row = BadRow(row.index, row.id, str(error))
            if isinstance(row, BadRow):
                self._fail(row, row.problem)
                continue
            waiting = _Waiting(row, [[] for _ in requests])
            for place, request in enumerate(requests):
                self._waiting[number] = waiting
                waiting.places[number] = place
                number += 1
                yield request

    def _finish(self, number: int, completion: Completion) -> None:
        """A sample of a request is complete; the row is finished when all of them are."""
        waiting = self._waiting[number]
        waiting.add(number, completion)
        if waiting.left:
            return
        for known in waiting.places:
            del self._waiting[known]
        errors = [item.error for samples in waiting.completions for item in samples if item.error is not None]
        if errors:
            self._fail(waiting.row, errors[0])
        else:
            self._keep(self._rows.form.answer(waiting.row, waiting.completions, self._engine))

    def _fail(self, row: JobRow | BadRow, reason: str) -> None:
        self._keep(self._rows.form.failure(row, reason))
        self._log("failed:", row, reason)

    def _log(self, what: str, row: JobRow | BadRow, reason: str) -> None:
        if self._logged < SHOWN:
            self._rows.log(f"{what} {location(self._rows.source, row.index + 1)}: {reason}")
        elif self._logged == SHOWN:
            self._rows.log("further rows that failed or were skipped are not listed")
        self._logged += 1

    def _show(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._report is not None and (last or now - self._reported > SECONDS_BETWEEN_REPORTS):
            finished = self._rows.finished
            failed = f"{finished.failed} failed, " if finished.failed else ""
            self._report(len(finished), self._rows.found.rows, f"{failed}{self._speed}")
            self._reported = now


class _Waiting:
    """A row with requests under way, and their completions so far."""

    def __init__(self, row: JobRow, completions: list[list[Completion]]) -> None:
        self.row, self.completions = row, completions
        self.places: dict[int, int] = {}  # place in `completions` of each request
        self.left = len(completions) * row.params.n

    def add(self, number: int, completion: Completion) -> None:
        self.completions[self.places[number]].append(completion)
        self.completions[self.places[number]].sort(key=lambda item: item.sample)
        self.left -= 1
