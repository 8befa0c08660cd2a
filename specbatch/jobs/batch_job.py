"""Batch jobs: prompts in, answers out, in the same order. An interrupted job can continue.

    job = BatchJob.open("in.jsonl", "out.jsonl", config, SamplingParams(max_new_tokens=64))
    with Engine(config) as engine:
        job.run(engine)

Input and output are JSONL or data sets (`specbatch.jobs.dataset`). The output is written when all rows are finished;
until then they are appended to `out.jsonl.partial`, whose first line holds the settings of the job. Running the same
job again continues it. A job with other settings (input, model, sampling) is rejected with the differences.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from specbatch.atomic_file import write_atomic
from specbatch.config import EngineConfig
from specbatch.core.request import Completion, SamplingParams
from specbatch.errors import SpecbatchError, refuse
from specbatch.jobs.dataset import is_saved, read_rows, write_rows
from specbatch.jobs.partial_output import PartialRows, row_seed
from specbatch.jobs.prompts import MalformedLine, Prompt, location, scan_prompts
from specbatch.progress import NotedReport, Speed

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine

FORMAT = 2
SHOWN = 20  # malformed lines that are listed one by one
SECONDS_BETWEEN_REPORTS = 0.2
_MAKES_TOKENS = (
    "model",
    "dtype",
    "kv_dtype",
    "fp8_activations",
    "state_dtype",
    "load_format",
    "tokenizer",
    "seed",
    "speculation",
)  # settings of the engine that must not change when a job continues
_TYPES = {
    "index": "int64",
    "id": "string",  # or int64
    "text": "string",
    "token_ids": "[int32]",
    "finish_reason": "string",
    "error": "string",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "accept_length": "float64",
    "verify_steps": "int64",
    "ttft_s": "float64",
    "tpot_s": "float64",
    "e2e_s": "float64",
}  # of the columns of an output data set


@dataclass
class BatchJob:
    """A job whose settings and input were checked, as far as that is possible without the model.

    prompts   by index: the position of the line or row in the input, from 0, counting blank and skipped ones
    skipped   malformed lines that are left out
    """

    source: str
    output: Path
    prompts: dict[int, Prompt]
    params: SamplingParams
    chat_template: bool
    seed: int
    kept: PartialRows
    log: Callable[[str], None]
    overwrite: bool = False
    replaces: bool = False  # an existing output is kept until the new one is complete
    skip_bad: bool = False
    skipped: list[MalformedLine] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        source: str | Path,
        output: str | Path,
        config: EngineConfig,
        params: SamplingParams,
        *,
        chat_template: bool = True,
        overwrite: bool = False,
        split: str | None = None,
        column: str | None = None,
        skip_bad: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> BatchJob:
        """Read the input, and the partial output of an interrupted run.

        output         a file ending in .jsonl or .parquet, or a folder: a name without an extension, or ending in /
        overwrite      replace an existing output; nothing is changed before `run` has checked the prompts
        split, column  as in `scan_prompts`
        skip_bad       leave malformed lines out, and log each

        Raises SpecbatchError for malformed lines (all in one message), an output that exists, is the input or cannot be
        written, and the partial output of another job.
        """
        found = scan_prompts(source, split=split, column=column)
        prompts = {item.line - 1: item for item in found if isinstance(item, Prompt)}
        path = _output_path(output)
        replaces = _is_there(path)
        if any(_holds(written, source) for written in (path, _beside(path, "partial"), _beside(path, "record.json"))):
            raise refuse("output", str(path), f"would replace the input {source}; name another one")
        settings = config.as_dict()
        contents = [[index, item.form, item.value, item.id] for index, item in prompts.items()]
        header = {
            "format": FORMAT,
            "input_sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
            **{name: settings[name] for name in _MAKES_TOKENS},
            "sampling": asdict(params),
            "chat_template": chat_template,
        }
        seed = config.seed if params.seed is None else params.seed
        kept = PartialRows(
            _beside(path, "partial"),
            header,
            lambda row: row["index"] in prompts and ("token_ids" in row or "error" in row),
            start_over="pass --overwrite",
        )
        job = cls(str(source), path, prompts, params, chat_template, seed, kept, log, overwrite, replaces, skip_bad)
        job._leave_out([item for item in found if isinstance(item, MalformedLine)], len(found))
        if not job._is_jsonl:
            _id_type(prompts, path)
        if replaces and not overwrite and not job.partial.exists():
            raise job._exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path.parent).close()  # fail now if the folder is not writable
            if job.partial.exists() and not overwrite:
                kept.load()
        except OSError as error:
            raise refuse("output", str(path), f"cannot be written ({error.strerror}); name another file") from error
        return job

    @property
    def failed(self) -> int:
        """How many of the finished prompts failed."""
        return sum("error" in row for row in self.finished.values())

    @property
    def partial(self) -> Path:
        return self.kept.path

    @property
    def record_path(self) -> Path:
        """Where the record of the run belongs."""
        return _beside(self.output, "record.json")

    @property
    def finished(self) -> dict[int, dict[str, Any]]:
        """Output rows by index, including those of an interrupted run."""
        return self.kept.rows

    def run(
        self, engine: Engine, *, concurrency: int | None = None, report: NotedReport | None = None
    ) -> list[dict[str, Any]]:
        """Generate the missing rows, write the output and return its rows in the order of the input.

        Prompts that this engine cannot run raise SpecbatchError, or are left out with `skip_bad`. The row of a prompt
        that fails while it runs has an `error` in place of an answer. After
        KeyboardInterrupt or an error the finished rows stay in the partial file.
        """
        encoded = self._encode(engine, {i: item for i, item in self.prompts.items() if i not in self.finished})
        with self.kept.claim(starts_over=self.overwrite) as keep:
            if _is_there(self.output) and not self.replaces:  # another process wrote it meanwhile
                raise self._exists()
            encoded = {index: ids for index, ids in encoded.items() if index not in self.finished}
            total = len(self.finished) + len(encoded)
            try:
                self._generate(engine, encoded, concurrency, keep, total, report)
            except KeyboardInterrupt:
                kept = f"kept {len(self.finished)} finished of {total} in {self.partial}"
                same = "the same command without --overwrite" if self.overwrite else "the same command"
                raise KeyboardInterrupt(f"{kept}; {same} continues") from None
            rows = [row for _, row in sorted(self.finished.items())]
            self._write(rows)
            self.partial.unlink()
        return rows

    def _generate(
        self,
        engine: Engine,
        encoded: Mapping[int, list[int]],
        concurrency: int | None,
        keep: Callable[[dict[str, Any]], None],
        total: int,
        report: NotedReport | None,
    ) -> None:
        indices, speed, reported = list(encoded), Speed(), 0.0
        if not indices:
            return
        params = [replace(self.params, seed=row_seed(self.seed, index)) for index in indices]
        with closing(engine.stream(list(encoded.values()), params, concurrency=concurrency)) as events:
            for event in events:
                completion = event.completion
                speed.add(event.index, len(event.token_ids), ended=completion is not None)
                if completion is not None and completion.finish_reason != "abort":
                    keep(self._row(indices[event.index], completion))
                    if completion.error is not None:
                        self.log(f"failed: {self._place(indices[event.index])}: {completion.error}")
                now = time.monotonic()
                if report is not None and (now - reported > SECONDS_BETWEEN_REPORTS or len(self.finished) == total):
                    report(len(self.finished), total, str(speed))
                    reported = now

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._is_jsonl:
            write_atomic(self.output, "".join(json.dumps(row) + "\n" for row in rows))
            return
        kind = _id_type(self.prompts, self.output)
        types = {name: of for name, of in _TYPES.items() if name != "id" and (name != "error" or self.failed)}
        write_rows(self.output, rows, types if kind is None else {"index": "int64", "id": kind} | types)

    def _leave_out(self, bad: list[MalformedLine], total: int) -> None:
        """Log malformed lines. Raises SpecbatchError without `skip_bad`, and if all `total` lines are malformed."""
        if not bad:
            return
        self.skipped += bad
        lines = [f"{location(self.source, item.line)}: {item.problem}" for item in bad[:SHOWN]]
        lines += [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        if self.skip_bad and len(bad) < total:
            for line in lines:
                self.log(f"skipped {line}")
            return
        if len(bad) == 1:
            hint = " (--skip-bad leaves it out)" if total > 1 else ""
            raise refuse("input", location(self.source, bad[0].line), bad[0].problem + hint)
        works = "fix them, or pass --skip-bad to leave them out" if len(bad) < total else "fix them"
        raise refuse("input", self.source, "\n".join([f"{len(bad)} of {total} lines are malformed; {works}:", *lines]))

    @property
    def _is_jsonl(self) -> bool:
        return self.output.suffix == ".jsonl"

    def _exists(self) -> SpecbatchError:
        return refuse("output", str(self.output), "already exists; name another file or pass --overwrite")

    def _encode(self, engine: Engine, missing: Mapping[int, Prompt]) -> dict[int, list[int]]:
        """Token ids by index, of the prompts that this engine can run."""
        encoded: dict[int, list[int]] = {}
        bad: list[MalformedLine] = []
        for index, prompt in missing.items():
            try:
                ids = prompt.encode(engine.tokenizer, chat_template=self.chat_template)
                engine.check(ids, self.params, index)
            except SpecbatchError as error:
                bad.append(MalformedLine(prompt.line, str(error)))
            else:
                encoded[index] = ids
        self._leave_out(bad, len(self.prompts))
        return encoded

    def _place(self, index: int) -> str:
        return location(self.source, self.prompts[index].line)

    def _row(self, index: int, completion: Completion) -> dict[str, Any]:
        metrics = completion.metrics
        row: dict[str, Any] = {"index": index}
        if self.prompts[index].id is not None:
            row["id"] = self.prompts[index].id
        if completion.error is not None:
            return row | {"finish_reason": completion.finish_reason, "error": completion.error}
        row |= {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": metrics.prompt_tokens,
            "output_tokens": metrics.output_tokens,
            "accept_length": metrics.accept_length,
            "verify_steps": metrics.verify_steps,
            "ttft_s": metrics.ttft_s,
            "tpot_s": metrics.tpot_s,
            "e2e_s": metrics.e2e_s,
        }
        return row


def read_output(output: Path) -> list[dict[str, Any]]:
    """The rows of a finished output: JSONL, Parquet or a folder."""
    if output.is_file() and output.suffix != ".parquet":
        return [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]
    # A cell of None is missing in a row of `read_rows`.
    there = dict.fromkeys(name for name in _TYPES if name not in ("id", "error"))
    return [there | row for row in read_rows("output", output, None, _TYPES)]


def summary(metrics: Mapping[str, Any], *, drafts: bool) -> str:
    """The metrics of a run in one line."""
    prompts = f"{metrics['requests']} prompt{'s' if metrics['requests'] != 1 else ''}"
    line = f"{prompts}, {metrics['output_tokens']} output tokens in {metrics['duration_s']:.1f} s"
    if metrics["output_throughput"] is not None:
        line += f": {metrics['output_throughput']:.0f} tok/s"
    if drafts and metrics["accept_length"] is not None:
        line += f", accept length {metrics['accept_length']:.2f}"
    return line


def _output_path(output: str | Path) -> Path:
    """The path of the output. Raises SpecbatchError for an unknown format, and if the path is not an output's."""
    path = Path(output)
    if path.suffix in (".jsonl", ".parquet"):
        if path.is_dir():
            raise refuse("output", str(path), f"is a folder; name a {path.suffix} file")
        return path
    if path.suffix and not str(output).endswith("/"):
        works = "name a .jsonl or .parquet file, or a folder (ending in / if its name has a dot)"
        raise refuse("output", str(output), works)
    if path.exists() and not path.is_dir():
        raise refuse("output", str(path), "already exists and is not a folder; name another one")
    if path.is_dir() and not is_saved(path):
        raise refuse("output", str(path), "is a folder with other files; name a new one, or a .jsonl file")
    return path


def _is_there(output: Path) -> bool:
    """Whether an output would replace something; an empty folder does not count."""
    return output.exists() and not (output.is_dir() and not any(output.iterdir()))


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(f"{output.name}.{suffix}")


def _holds(written: Path, source: str | Path) -> bool:
    """Whether writing to a path would change the input: it is the same file, by links too, or a folder of it."""
    given = Path(source)
    same = written.exists() and given.exists() and written.samefile(given)
    return same or written.resolve() in (given.resolve(), *given.resolve().parents)


def _id_type(prompts: Mapping[int, Prompt], output: Path) -> str | None:
    """The common type of all ids, None without ids. Raises SpecbatchError for mixed types and more than 64 bits."""
    ids = [item.id for item in prompts.values() if item.id is not None]
    if not ids:
        return None
    if all(isinstance(item, str) for item in ids):
        return "string"
    if all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in ids):
        return "int64"
    works = "the ids mix strings and numbers, or exceed 64 bits, which a column cannot hold; name a .jsonl file"
    raise refuse("output", str(output), works)
