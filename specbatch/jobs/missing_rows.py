"""Rows of a job that have no answer yet, as they are read again, checked against the engine and encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specbatch.errors import SpecbatchError
from specbatch.jobs.formats import BadRow, JobFormat, JobRow, Request
from specbatch.jobs.input_scan import BadLines, InputScan, job_rows, rendered_ahead
from specbatch.jobs.partial_output import RowsOnDisk

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

CHECKED_TOKENS = 1 << 19  # of prompts that are encoded before the first one runs: a second or two


@dataclass
class MissingRows:
    """The rows that are neither finished nor left out.

    source     of the input, for messages
    found      whose `rows` are fewer by each row that is left out
    skip_bad   leave out rows that the engine refuses, instead of an error
    skipped    malformed lines that are left out
    left_out   their indices, of those that only the engine refuses
    encoded    requests of rows that were checked and have not begun
    """

    source: str
    form: JobFormat
    found: InputScan
    finished: RowsOnDisk
    log: Callable[[str], None]
    skip_bad: bool
    skipped: int = 0
    left_out: set[int] = field(default_factory=set)
    encoded: dict[int, list[Request]] = field(default_factory=dict)

    def read(self, engine: InferenceEngine) -> Iterator[JobRow | BadRow]:
        """The rows in order."""
        every = job_rows(self.form, self.found)
        missing = (row for row in every if row.index not in self.finished and row.index not in self.left_out)
        return rendered_ahead(missing, self.form, engine, self.encoded)

    def requests_of(self, row: JobRow | BadRow, engine: InferenceEngine) -> list[Request]:
        """Those of a malformed row are none. Raises SpecbatchError for a row that the engine refuses."""
        if isinstance(row, BadRow):
            return []
        return self.encoded.pop(row.index, None) or self.form.encode(row, engine)

    def leave_out(self, index: int) -> None:
        """The engine refuses a row, which is skipped."""
        self.left_out.add(index)
        self.skipped += 1
        self.found.rows -= 1

    def check(self, engine: InferenceEngine) -> None:
        """Refuse the first rows if this engine cannot run them, or leave them out."""
        bad, refused, tokens = BadLines(self.source), list[int](), 0
        for row in self.read(engine):
            if isinstance(row, JobRow):
                try:
                    self.encoded[row.index] = self.form.encode(row, engine)
                    tokens += sum(len(prompt) for prompt, _ in self.encoded[row.index])
                except SpecbatchError as error:
                    bad.add(row.index, str(error))
                    refused.append(row.index)
            if tokens > CHECKED_TOKENS:
                break
        bad.leave_out(self.found.rows, skip=self.skip_bad, log=self.log)
        for index in refused:
            self.leave_out(index)
