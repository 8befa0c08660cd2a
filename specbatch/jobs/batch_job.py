"""Batch jobs: prompts in, answers out, in the same order. An interrupted job can continue.

    job = BatchJob.open("in.jsonl", "out.jsonl", config, SamplingParams(max_new_tokens=64))
    with Engine(config) as engine:
        job.run(engine)

Input and output are files larger than memory, if need be. A first pass checks and hashes the input. The first rows are
encoded, to see that the engine takes them; then a second pass encodes rows as the engine takes them. An input that
changes meanwhile ends the job. Finished rows are appended to `out.jsonl.partial`, whose first line holds the settings
of the job; memory keeps their offsets. When all rows are finished the output is assembled from that file in
the order of the input. Running the same job again continues it. A job with other settings (input, model, sampling) is
rejected with the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig
from specbatch.config.job_size import JobSize
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError, refuse, reporting
from specbatch.files.text_files import UnreadableError
from specbatch.jobs.formats import JobFormat, PromptRows
from specbatch.jobs.input_scan import BadLines, InputScan, scan
from specbatch.jobs.job_run import JobRun, Keep
from specbatch.jobs.job_settings import NO_LIMITS, USUAL, JobSettings, Limits
from specbatch.jobs.missing_rows import MissingRows
from specbatch.jobs.openai_batch import OpenAIBatch, is_openai_batch
from specbatch.jobs.output_files import OutputFiles, column_types
from specbatch.jobs.partial_output import MAKES_TOKENS, PartialRows, RowsOnDisk
from specbatch.jobs.prompts import LINES
from specbatch.progress.bars import NotedReport, Report
from specbatch.records.differences import describe_differences

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

FORMAT = 3
_REPLACES = "replaces"  # noted in a partial output that was begun where there was an output already


@dataclass
class BatchJob:
    """A job whose settings and input were checked, as far as that is possible without the model.

    total      rows of the job
    missing    those that have no answer yet
    stopped    the limit that ended the last run before the job was finished, or None
    written    rows of the output, without the error file of an OpenAI batch: each sample of a prompt is one
    complete   the record of the output, if an earlier run of this job has finished it: nothing is left to run
    """

    output: OutputFiles
    form: JobFormat
    found: InputScan
    kept: PartialRows
    settings: JobSettings
    missing: MissingRows
    replaces: bool  # an existing output is kept until the new one is complete
    stopped: str | None = None
    written: int = 0
    complete: dict[str, Any] | None = None

    @classmethod
    def open(
        cls,
        source: str | Path,
        output: str | Path,
        config: EngineConfig,
        params: SamplingParams,
        *,
        settings: JobSettings = USUAL,
        given: Collection[str] | None = None,
        log: Callable[[str], None] = lambda line: None,
        report: Report | None = None,
    ) -> BatchJob:
        """Read the input once, and the partial output of an interrupted run.

        source         prompts (`specbatch.jobs.prompts`), a data set, or an OpenAI batch file
        output         a file ending in .jsonl or .parquet, or a folder: a name without an extension, or ending in /
        given          the parameters that the user set, which replace OpenAI's defaults in an OpenAI batch; None: those
                       that are not the defaults of `SamplingParams`
        report         called with how many rows of the input were read

        Raises SpecbatchError for malformed lines (all in one message), an output that exists, is the input or cannot be
        written, and the partial output of another job.
        """
        retry_failed, overwrite = settings.retry_failed, settings.overwrite
        files = OutputFiles(output)
        files.check_is_not(source)
        seed = config.seed if params.seed is None else params.seed
        form: JobFormat
        if settings.column is None and settings.split is None and is_openai_batch(source):
            if not files.is_jsonl:
                raise refuse("output", files.name, "the output of an OpenAI batch is JSONL; name a .jsonl file")
            values = _given(params, given)
            form = OpenAIBatch(
                source, values, seed=seed, chat_template=settings.chat_template, model=config.model, log=log
            )
        else:
            form = PromptRows(
                source,
                params,
                seed=seed,
                chat_template=settings.chat_template,
                split=settings.split,
                column=settings.column,
                log=log,
            )
        bad = BadLines(source)
        found = scan(form, bad, report)
        if not found.rows and not bad.count:
            raise refuse("input", str(source), f"has no prompts; write {LINES}")
        bad.leave_out(found.rows + bad.count, skip=settings.skip_bad, log=log)
        made_by = config.as_dict()
        header = {
            "format": FORMAT,
            "input_sha256": found.sha256,
            **{name: made_by[name] for name in MAKES_TOKENS},
            "sampling": asdict(params),
            "chat_template": settings.chat_template,
        }
        replaces = files.exists()
        kept = PartialRows(
            files.partial,
            header,
            lambda row: 0 <= row["index"] < found.end and form.is_kept(row),
            start_over="pass overwrite=True",
            usual={"sampling": asdict(SamplingParams())},
            retry_failed=retry_failed,
            note={_REPLACES: True} if replaces else {},
        )
        missing = MissingRows(str(source), form, found, kept.rows, log, settings.skip_bad, skipped=bad.count)
        job = cls(files, form, found, kept, settings, missing, replaces)
        job._check_columns()
        continues = kept.path.exists() and not overwrite
        if replaces and retry_failed:
            job._check_record()
        elif replaces and not overwrite and not continues:
            job.complete = job._complete()
            return job
        elif retry_failed and not continues:
            works = f"there are no failed rows, neither in {files.name} nor in {files.partial}; leave it out"
            raise refuse("retry_failed", True, works)
        if not (replaces or continues or overwrite):
            files.check_beside(batch=job.is_batch)
        files.prepare()
        if continues:
            kept.load()
            if replaces and not retry_failed and _REPLACES not in kept.note and not job._is_published():
                works = f"the job in {kept.path} did not write it; move it away, then the same command continues"
                raise refuse("output", files.name, works)
        return job

    @property
    def total(self) -> int:
        return self.found.rows

    @property
    def skipped(self) -> int:
        """How many malformed lines are left out."""
        return self.missing.skipped

    @property
    def size(self) -> JobSize:
        """What is known of the rows that are left, before they are encoded."""
        found, answers = self.found, max(self.found.answers, 1)
        left = answers * (found.rows - len(self.finished)) // max(found.rows, 1)
        means = max(found.prompt_tokens / answers, 1), max(found.new_tokens / answers, 1)
        return JobSize(max(left, 1), *means, found.shared_tokens)

    @property
    def is_batch(self) -> bool:
        """Whether the input is an OpenAI batch file."""
        return isinstance(self.form, OpenAIBatch)

    @property
    def failed(self) -> int:
        """How many of the finished rows failed."""
        return self.finished.failed

    @property
    def partial(self) -> Path:
        return self.kept.path

    @property
    def finished(self) -> RowsOnDisk:
        """Finished rows by index, including those of an interrupted run. They can be read until the job is finished."""
        return self.kept.rows

    def run(
        self,
        engine: InferenceEngine,
        *,
        concurrency: int | None = None,
        limits: Limits = NO_LIMITS,
        report: NotedReport | None = None,
    ) -> bool:
        """Generate the missing rows and write the output. Returns False if `limits` ended the run before (`stopped`).

        Prompts that this engine cannot run become error rows, or are left out with `skip_bad`. Outside of an OpenAI
        batch those among the first tokens (`missing_rows.CHECKED_TOKENS`) raise SpecbatchError before anything runs.
        The row of a prompt that fails while it runs has an `error` in place of an answer.
        After KeyboardInterrupt, an error or a limit the finished rows stay in the partial file.
        """
        if self.complete is not None:
            return True
        if not self.form.keeps_bad_rows:
            self.missing.check(engine)
        with self.kept.claim(starts_over=self.settings.overwrite) as keep:
            if self.settings.retry_failed and self.replaces:
                self._keep_earlier(keep)
            elif not self.replaces and self.output.exists():  # another process wrote it meanwhile
                raise self._exists()
            with reporting(self._how_to_continue):
                stopped = JobRun(self.missing, engine, keep, limits, report).run(concurrency)
                if stopped is not None:
                    self.stopped = f"stopped by {stopped}; {self._how_to_continue()}"
                    return False
                self.kept.check()
                if not self.replaces and self.output.exists():
                    works = (
                        "something else wrote it during the job; move it away, then the same command writes the answers"
                    )
                    raise refuse("output", self.output.name, works)
                self._publish()
            self.kept.remove()
        return True

    def _publish(self) -> None:
        rows = (row for kept in self.finished.ordered() for row in self.form.output_rows(kept))
        if self.is_batch:
            self.written = self.output.publish_batch(rows)
            return
        present = self.found.present | ({"error"} if self.failed else set())
        self.written = self.output.publish(rows, column_types(self.found.id_type, present))

    def _how_to_continue(self) -> str:
        same = "the same command without --overwrite" if self.settings.overwrite else "the same command"
        return self.kept.or_lost(
            f"kept {len(self.finished)} finished of {self.total} in {self.partial}; {same} continues"
        )

    def _check_columns(self) -> None:
        """Refuse rows that a data set cannot hold."""
        if self.output.is_jsonl:
            return
        if self.found.id_type not in (None, "string", "int64"):
            works = "the ids mix strings and numbers, or exceed 64 bits, which a column cannot hold; name a .jsonl file"
            raise refuse("output", self.output.name, works)
        for name in ("top_logprobs", "prompt_logprobs"):
            if name in self.found.present:
                raise refuse("output", self.output.name, f"has no column for {name}; name a .jsonl file")

    def _is_published(self) -> bool:
        """Whether the output has finished rows, all or the first of them: an earlier run was killed before it removed
        the partial output, or a store broke off."""
        finished = (row for row in self.finished.ordered() if row.get("error") is None)
        try:
            rows = self.form.kept_rows(self.output.read())
            return len(self.finished) == self.total and all(row == next(finished, None) for row in rows)
        except (UnreadableError, KeyError, TypeError, AttributeError):
            return False

    def counts(self) -> dict[str, int]:
        """What the record of the output has of it. prompts: those with a row in the output."""
        prompts = len(self.finished) - (self.failed if self.is_batch else 0)
        return {"prompts": prompts, "rows": self.written, "failed": self.failed, "skipped": self.skipped}

    def _complete(self) -> dict[str, Any]:
        """The record of the existing output. Refused: an output that this job did not finish, or that was changed."""
        try:
            record = self.output.record_of()
        except SpecbatchError:
            raise self._exists() from None
        counts = record["workload"].get("output")
        rows = counts.get("rows") if isinstance(counts, dict) else None
        if self.kept.differences(record["workload"]) or rows is None or rows != self.output.count():
            raise self._exists()
        return record

    def _check_record(self) -> None:
        """Refuse to complete an output that another job wrote."""
        workload = self.output.record_of()["workload"]
        if differs := self.kept.differences(workload):
            other = describe_differences(workload, self.kept.header, differs)
            works = f"was made with another {other}; only the same job can complete it"
            raise refuse("retry_failed", self.output.name, works)

    def _keep_earlier(self, keep: Keep) -> None:
        """Copy the rows of the existing output that did not fail to the partial output."""
        try:
            for row in self.form.kept_rows(self.output.read()):
                if row["index"] not in self.finished:
                    keep(row)
        except (UnreadableError, KeyError, TypeError, AttributeError) as error:
            raise refuse(
                "output", self.output.name, "has lines that this job did not write; use overwrite=True"
            ) from error

    def _exists(self) -> SpecbatchError:
        return refuse("output", self.output.name, "already exists; name another file or pass overwrite=True")


def _given(params: SamplingParams, names: Collection[str] | None) -> dict[str, Any]:
    """The values that the user set. The seed is that of the job."""
    usual = SamplingParams()
    if names is None:
        names = [item.name for item in fields(params) if getattr(params, item.name) != getattr(usual, item.name)]
    return {name: getattr(params, name) for name in names if name != "seed"}
