"""JSONL in, JSONL out: order kept, resumable, and the output file appears only when it is complete.

    job = BatchJob.open(Path("in.jsonl"), Path("out.jsonl"), config, SamplingParams(max_new_tokens=64))
    with Engine(config) as engine:
        job.run(engine)

Finished rows are appended to `out.jsonl.partial`, whose first line says what they were made from. Running the
same job again continues it; a job that differs (input, model, sampling ...) is refused with what differs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from specbatch.config import EngineConfig
from specbatch.errors import SpecbatchError, refuse
from specbatch.metrics import write_atomic
from specbatch.partial import PartialRows, row_seed
from specbatch.progress import Report
from specbatch.prompts import Prompt, read_prompts
from specbatch.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specbatch.engine import Engine

FORMAT = 1
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
    kept: PartialRows
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
        kept = PartialRows(
            output.with_name(f"{output.name}.partial"),
            header,
            lambda row: row["index"] in range(len(prompts)) and "token_ids" in row,
            anew="pass --overwrite",
        )
        job = cls(output, prompts, params, chat_template, seed, kept, overwrite, replaces)
        if replaces and not overwrite and not job.partial.exists():
            raise job._exists()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=output.parent).close()  # an unwritable place is found now, not after the run
            if job.partial.exists() and not overwrite:
                kept.load()
        except OSError as error:
            raise refuse("output", str(output), f"cannot be written ({error.strerror}); name another file") from error
        return job

    @property
    def partial(self) -> Path:
        return self.kept.path

    @property
    def finished(self) -> dict[int, dict[str, Any]]:
        """Output rows by index, those of an interrupted run among them."""
        return self.kept.rows

    def run(
        self, engine: Engine, *, concurrency: int | None = None, report: Report | None = None
    ) -> list[dict[str, Any]]:
        """Generate what is missing and write the output; return its rows in input order.

        KeyboardInterrupt and errors leave the finished rows in the partial file.
        """
        missing = [index for index in range(len(self.prompts)) if index not in self.finished]
        encoded = [self._encode(engine, self.prompts[index]) for index in missing]
        with self.kept.claim() as keep:
            if self.output.exists() and not self.replaces:  # another process was faster
                raise self._exists()

            def finish(completion: Completion) -> None:
                if completion.finish_reason == "abort":
                    return
                keep(self._row(missing[completion.index], completion))
                if report is not None:
                    report(len(self.finished), len(self.prompts))

            try:
                if missing:
                    params = [replace(self.params, seed=row_seed(self.seed, index)) for index in missing]
                    engine.generate(encoded, params, concurrency=concurrency, on_completion=finish)
            except KeyboardInterrupt:
                kept = f"kept {len(self.finished)} finished of {len(self.prompts)} in {self.partial}"
                same = "the same command without --overwrite" if self.overwrite else "the same command"
                raise KeyboardInterrupt(f"{kept}; {same} continues") from None
            rows = [self.finished[index] for index in range(len(self.prompts))]
            write_atomic(self.output, "".join(json.dumps(row) + "\n" for row in rows))
            self.partial.unlink()
        return rows

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
