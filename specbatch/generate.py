"""JSONL in, JSONL out: order kept, resumable, and the output file appears only when it is complete.

    job = BatchJob.open(Path("in.jsonl"), Path("out.jsonl"), config, SamplingParams(max_new_tokens=64))
    with Engine(config) as engine:
        job.run(engine)

Finished rows are appended to `out.jsonl.partial`, whose first line says what they were made from. Running the
same job again continues it; a job that differs (input, model, sampling ...) is refused with what differs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

from specbatch.config import EngineConfig
from specbatch.errors import SpecbatchError, refuse
from specbatch.metrics import write_atomic
from specbatch.progress import Report
from specbatch.prompts import Prompt, read_prompts
from specbatch.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specbatch.engine import Engine

FORMAT = 1
SECONDS_BETWEEN_SYNCS = 5.0
_MAKES_TOKENS = (
    "model",
    "dtype",
    "load_format",
    "tokenizer",
    "seed",
    "speculation",
)  # settings a resume must share


@dataclass
class BatchJob:
    """A checked job: nothing that could be refused without the model is wrong any more."""

    output: Path
    prompts: list[Prompt]
    params: SamplingParams
    chat_template: bool
    seed: int
    header: dict[str, Any]
    finished: dict[int, dict[str, Any]]  # output rows of an interrupted run, by index
    overwrite: bool = False
    replaces: bool = False  # an output was there at the start; it stays until the new one is complete

    @classmethod
    def open(
        cls,
        source: Path,
        output: Path,
        config: EngineConfig,
        params: SamplingParams,
        *,
        chat_template: bool = True,
        overwrite: bool = False,
    ) -> BatchJob:
        """Read the input and what an interrupted run left.

        `overwrite` starts anew whatever is there; nothing is touched before `run` has checked the prompts.
        Refused: a malformed line, an output that exists, a partial output of another job, a place that cannot
        be written, the input itself.
        """
        prompts = read_prompts(source)
        if output.is_dir():
            raise refuse("output", str(output), "is a folder; name a .jsonl file")
        replaces = output.exists()
        if replaces and output.samefile(source):
            raise refuse("output", str(output), "is the input; name another file")
        settings = config.as_dict()
        header = {
            "format": FORMAT,
            "input_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            **{name: settings[name] for name in _MAKES_TOKENS},
            "sampling": asdict(params),
            "chat_template": chat_template,
        }
        seed = config.seed if params.seed is None else params.seed
        header = json.loads(json.dumps(header))
        job = cls(output, prompts, params, chat_template, seed, header, {}, overwrite, replaces)
        if replaces and not overwrite and not job.partial.exists():
            raise job._exists()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=output.parent).close()  # an unwritable place is found now, not after the run
            if job.partial.exists() and not overwrite:
                job._load()
        except OSError as error:
            raise refuse("output", str(output), f"cannot be written ({error.strerror}); name another file") from error
        return job

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")

    def run(
        self, engine: Engine, *, concurrency: int | None = None, report: Report | None = None
    ) -> list[dict[str, Any]]:
        """Generate what is missing and write the output; return its rows in input order.

        KeyboardInterrupt and errors leave the finished rows in the partial file.
        """
        missing = [index for index in range(len(self.prompts)) if index not in self.finished]
        encoded = [self._encode(engine, self.prompts[index]) for index in missing]
        with self._claim() as file:
            synced = time.monotonic()

            def keep(completion: Completion) -> None:
                nonlocal synced
                if completion.finish_reason == "abort":
                    return
                index = missing[completion.index]
                self.finished[index] = self._row(index, completion)
                file.write(json.dumps(self.finished[index]) + "\n")
                file.flush()
                if time.monotonic() - synced > SECONDS_BETWEEN_SYNCS:
                    os.fsync(file.fileno())
                    synced = time.monotonic()
                if report is not None:
                    report(len(self.finished), len(self.prompts))

            try:
                if missing:
                    params = [self._params(index) for index in missing]
                    engine.generate(encoded, params, concurrency=concurrency, on_completion=keep)
            except KeyboardInterrupt:
                kept = f"kept {len(self.finished)} finished of {len(self.prompts)} in {self.partial}"
                same = "the same command without --overwrite" if self.overwrite else "the same command"
                raise KeyboardInterrupt(f"{kept}; {same} continues") from None
            finally:
                file.flush()
                os.fsync(file.fileno())
            rows = [self.finished[index] for index in range(len(self.prompts))]
            write_atomic(self.output, "".join(json.dumps(row) + "\n" for row in rows))
            self.partial.unlink()
        return rows

    @contextmanager
    def _claim(self) -> Iterator[TextIO]:
        """The partial file, open for appending and this process's alone: a header and whole lines."""
        with self.partial.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                works = "another process is writing it; wait for that or name another output"
                raise refuse("output", str(self.partial), works) from None
            if self.output.exists() and not self.replaces:  # another process was faster
                raise self._exists()
            file.seek(0)
            text = file.read() if self.finished else ""
            whole = text[: text.rfind("\n") + 1]  # a last line that a crash cut short is dropped
            file.truncate(len(whole.encode()))
            if not whole:
                file.write(json.dumps(self.header) + "\n")
                file.flush()
            yield file

    def _exists(self) -> SpecbatchError:
        return refuse("output", str(self.output), "exists already; name another file or pass --overwrite")

    def _encode(self, engine: Engine, prompt: Prompt) -> list[int]:
        ids = prompt.encode(engine.tokenizer, chat_template=self.chat_template)
        longest = engine.caps["max_model_len"] - self.params.max_new_tokens
        if len(ids) > longest:
            raise refuse(
                "input",
                f"line {prompt.line}",
                f"has {len(ids)} tokens; with max_new_tokens={self.params.max_new_tokens} and "
                f"max_model_len={engine.caps['max_model_len']} a prompt may have {max(longest, 0)}",
            )
        return ids

    def _params(self, index: int) -> SamplingParams:
        """A seed that depends on the row, not on how much of the file an earlier run had finished."""
        return replace(self.params, seed=random.Random(f"{self.seed}/{index}").getrandbits(31))

    def _row(self, index: int, completion: Completion) -> dict[str, Any]:
        metrics = completion.metrics
        row: dict[str, Any] = {"index": index}
        if self.prompts[index].id is not None:
            row["id"] = self.prompts[index].id
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

    def _load(self) -> None:
        """Load the partial file's whole lines."""
        text = self.partial.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            return
        try:
            header, *rows = [json.loads(line) for line in whole.splitlines()]
            differs = [name for name in self.header if header.get(name) != self.header[name]]
            self.finished = {row["index"]: row for row in rows}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise refuse(
                "output", str(self.partial), "is not a partial output; pass --overwrite to start anew"
            ) from error
        if differs and self.finished:
            raise refuse(
                "output",
                str(self.partial),
                f"was made with another {_difference(header, self.header, differs)}; finish that job, name "
                "another output or pass --overwrite",
            )


def _difference(old: dict[str, Any], new: dict[str, Any], names: Iterable[str]) -> str:
    """For example: temperature (0.7 there, 0.0 now), input_sha256."""
    parts = []
    for name in names:
        before, after = old.get(name), new[name]
        if isinstance(before, dict) and isinstance(after, dict):
            parts.append(_difference(before, after, [key for key in after if before.get(key) != after[key]]))
        elif name == "input_sha256":
            parts.append("input file")
        else:
            parts.append(f"{name} ({before!r} there, {after!r} now)")
    return ", ".join(parts)
