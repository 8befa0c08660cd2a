"""Formats of a batch job: how a row of the input becomes requests, and their completions a row of the output.

`PromptRows` is the format of this package; `specbatch.jobs.openai_batch` has OpenAI's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SAMPLED, SamplingParams, unsampled
from specbatch.errors import SpecbatchError
from specbatch.jobs.input_version import InputVersion
from specbatch.jobs.partial_output import Row, row_seed
from specbatch.jobs.prompts import MalformedLine, Prompt, PromptReader, UnreadKeys, params_of, unsampled_note

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

Request = tuple[list[int], SamplingParams]  # prompt token ids, and how to continue them
COLUMNS = {
    "index": "int64",
    "id": "string",  # or int64
    "sample": "int64",
    "text": "string",
    "token_ids": "[int32]",
    "logprobs": "[float64]",
    "finish_reason": "string",
    "error": "string",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "accept_length": "float64",
    "verify_steps": "int64",
    "ttft_s": "float64",
    "tpot_s": "float64",
    "e2e_s": "float64",
}  # of an output row, with their types in a data set
SOMETIMES = ("id", "sample", "logprobs", "error")  # columns that some outputs lack


@dataclass(slots=True)  # a frozen one takes three times as long to make
class JobRow:
    """A valid row of the input.

    index     its line or row, from 0
    request   what it asks for, in the format's own terms
    params    its sampling parameters
    identity  a JSON value of everything that its answer depends on
    """

    index: int
    id: str | int | None
    request: Any
    params: SamplingParams
    identity: Any


@dataclass(frozen=True)
class BadRow:
    """A row of the input that cannot run, with the reason."""

    index: int
    id: str | int | None
    problem: str
    identity: Any = None


class JobFormat(ABC):
    """Input and output rows of a job."""

    keeps_bad_rows = False  # as error rows; otherwise the user fixes them or leaves them out
    unique_ids = False

    @abstractmethod
    def rows(self) -> Iterator[JobRow | BadRow]:
        """The rows of the input, read anew."""

    @abstractmethod
    def encode(self, row: JobRow, engine: InferenceEngine) -> list[Request]:
        """The requests of a row. Raises SpecbatchError if the engine cannot run one."""

    @abstractmethod
    def conversations(self, row: JobRow) -> list[Any]:
        """The messages that `encode` renders with the chat template."""

    @abstractmethod
    def answer(self, row: JobRow, completions: Sequence[Sequence[Completion]], engine: InferenceEngine) -> Row:
        """The row to keep. completions: the samples of each request."""

    @abstractmethod
    def failure(self, row: JobRow | BadRow, reason: str) -> Row:
        """The row to keep of a row that failed, with an `error`."""

    @abstractmethod
    def is_kept(self, row: Row) -> bool:
        """Whether a row of a partial output has the keys of one that was kept."""

    @abstractmethod
    def output_rows(self, kept: Row) -> Iterable[Row]:
        """The rows of the output that a kept row stands for."""

    @abstractmethod
    def kept_rows(self, output: Iterable[Row]) -> Iterator[Row]:
        """The inverse of `output_rows` for a whole output, without rows that failed."""


class PromptRows(JobFormat):
    """Prompts in, one row for each answer out; `sampling` in a row overrides the parameters of the job."""

    def __init__(
        self,
        source: str | Path,
        params: SamplingParams,
        *,
        seed: int,
        chat_template: bool,
        split: str | None,
        column: str | None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._log, self._noted, self._unread = log, set[str](), UnreadKeys(source, log)
        self._source, self._params, self._seed = source, params, seed
        self._chat_template, self._split = chat_template, split
        self._reader = PromptReader(column=column)
        self._version = InputVersion("input", source)

    def rows(self) -> Iterator[JobRow | BadRow]:
        checked: SamplingParams | None = None  # rows of one kind share their parameters
        for number, raw in self._reader.rows("input", self._source, self._split, version=self._version):
            item = self._reader.read(number, raw)
            if isinstance(item, MalformedLine):
                yield BadRow(number - 1, None, item.problem)
                continue
            self._unread.add(item)
            identity = [number - 1, item.form, item.value, item.id] + ([item.sampling] if item.sampling else [])
            try:
                params = params_of(item, self._params)
            except SpecbatchError as error:  # together with the parameters of the job
                yield BadRow(number - 1, item.id, f"sampling: {error}")
                continue
            if params is not checked and (lost := unsampled({name: getattr(params, name) for name in SAMPLED})):
                self._note(lost, number)
            checked = params
            yield JobRow(number - 1, item.id, item, params, identity)

    def _note(self, names: Iterable[str], number: int) -> None:
        """Log sampling parameters without an effect, each once."""
        if new := set(names) - self._noted:
            self._noted |= new
            self._log(unsampled_note(self._source, number, new))

    def encode(self, row: JobRow, engine: InferenceEngine) -> list[Request]:
        prompt: Prompt = row.request
        params = row.params
        if "seed" not in prompt.sampling:
            params = params.with_seed(row_seed(self._seed, row.index))
        tokens = prompt.encode(engine.tokenizer, chat_template=self._chat_template, most=engine.caps["max_model_len"])
        engine.check(tokens, params)
        return [(tokens, params)]

    def conversations(self, row: JobRow) -> list[Any]:
        prompt: Prompt = row.request
        return [prompt.value] if prompt.form == "messages" and self._chat_template else []

    def answer(self, row: JobRow, completions: Sequence[Sequence[Completion]], engine: InferenceEngine) -> Row:
        rows = [self._start(row) | _numbers(item) for item in completions[0]]
        if row.params.n == 1:
            return rows[0]
        return {"index": row.index, "samples": [{"index": row.index, "sample": n} | one for n, one in enumerate(rows)]}

    def failure(self, row: JobRow | BadRow, reason: str) -> Row:
        return self._start(row) | {"finish_reason": "error", "error": reason}

    def is_kept(self, row: Row) -> bool:
        return "token_ids" in row or "error" in row or isinstance(row.get("samples"), list)

    def output_rows(self, kept: Row) -> Iterable[Row]:
        samples: list[Row] = kept.get("samples", [kept])
        return samples

    def kept_rows(self, output: Iterable[Row]) -> Iterator[Row]:
        for index, group in groupby(output, key=lambda row: row["index"]):
            rows = list(group)
            if rows[0].get("error") is None:
                yield rows[0] if rows[0].get("sample") is None else {"index": index, "samples": rows}

    @staticmethod
    def _start(row: JobRow | BadRow) -> Row:
        return {"index": row.index, **({} if row.id is None else {"id": row.id})}


def _numbers(completion: Completion) -> Row:
    metrics = completion.metrics
    found: Row = {
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
    if completion.logprobs is not None:
        found["logprobs"] = completion.logprobs
    if completion.top_logprobs is not None:
        found["top_logprobs"] = completion.top_logprobs
    if completion.prompt_logprobs is not None:
        found["prompt_logprobs"] = completion.prompt_logprobs
    return found
