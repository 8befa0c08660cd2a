"""Finished results of an evaluation: kept on disk as they finish, so that an interrupted evaluation continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.core.sampling_params import SAMPLED
from specbatch.errors import FailedError, reporting
from specbatch.evals.options import MAX_NEW_TOKENS
from specbatch.jobs.partial_output import MAKES_TOKENS, PartialRows
from specbatch.records.metrics import METRICS
from specbatch.records.store import EARLIER
from specbatch.records.summarize import emitted_histogram, summarize, total_acceptance

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.engine.scoring import Likelihood
    from specbatch.evals.options import EvalOptions
    from specbatch.records.run_record import RunRecord
    from specbatch.servers.server import Server

PARTIAL = "answers.partial.jsonl"
Row = dict[str, Any]
_OF_SERVER = ("model", "server", "tokenizer", "seed")  # what its answers depend on, beside what it was started with
_ASKED = ("limit", "chat_template", "thinking", "think_end_token", "max_new_tokens")
# Earlier versions wrote no such setting, so its default is left out.
_SINCE = (
    *("offset", "samples"),
    *("system_instruction", "gen_kwargs", "fewshot_as_multiturn", "add_bos_token", "truncate_prompts"),
)

_LATER = ("untrimmed_histogram",)  # numbers of a request that earlier versions did not write


class Answer(NamedTuple):
    """A finished request and the document of the task that it answers.

    request      hash of its prompt and generation arguments
    completion   its index is its position among the requests of the task
    """

    doc_id: int
    request: str
    completion: Completion

    def as_row(self) -> Row:
        done = self.completion
        return {
            "index": done.index,
            "doc_id": self.doc_id,
            "request": self.request,
            "text": done.text,
            **({} if done.reasoning is None else {"reasoning": done.reasoning}),
            "token_ids": done.token_ids,
            **done.as_row(),
        }

    @classmethod
    def from_row(cls, row: Row, prompt_token_ids: list[int]) -> Answer:
        names = [item.name for item in fields(RequestMetrics) if item.name in row or item.name not in _LATER]
        numbers = {name: row[name] for name in names}
        metrics = RequestMetrics(**numbers | {"acceptance": Acceptance(**row["acceptance"])})
        done = (row["index"], prompt_token_ids, row["token_ids"], row["text"], row["finish_reason"], metrics)
        completion = Completion(*done, seed=row.get("seed"), reasoning=row.get("reasoning"))
        return cls(row["doc_id"], row["request"], completion)


@dataclass(frozen=True)
class Scored:
    """The log-likelihood of one text of a document.

    index     its position among the texts of the task
    part      counts the document's choices, or the windows of a text that is longer than the model's context
    request   hash of its token ids
    """

    index: int
    doc_id: int
    part: int
    request: str
    prompt_tokens: int
    scored_tokens: int
    likelihood: Likelihood

    def as_row(self) -> Row:
        return {"doc_id": self.doc_id, "part": self.part, "request": self.request, **self.numbers()}

    def numbers(self) -> Row:
        """The entry of the text in a record."""
        counts = {"prompt_tokens": self.prompt_tokens, "scored_tokens": self.scored_tokens}
        return {"index": self.index, **counts, **self.likelihood._asdict()}

    @classmethod
    def from_row(cls, row: Row) -> Scored:
        from specbatch.engine.scoring import Likelihood

        own = {item.name: row[item.name] for item in fields(cls) if item.name != "likelihood"}
        return cls(**own, likelihood=Likelihood(row["logprob"], row["is_greedy"]))


def hash_of(request: Any) -> str:
    return hashlib.sha256(json.dumps(request, default=str).encode()).hexdigest()


def finished_rows(
    options: EvalOptions, num_fewshot: int | dict[str, int], config: EngineConfig | Server, *, generates: bool
) -> PartialRows:
    """The file of finished results in the output folder of `options`, with the rows of an interrupted run.

    Refused: results that were made with other settings.
    """
    assert options.output is not None
    settings = config.as_dict()
    usual = {item.name: item.default for item in fields(options)}
    header = {
        "command": "eval",
        "task": options.task,
        "num_fewshot": num_fewshot,
        "fewshot_seed": options.seed,
        **{name: getattr(options, name) for name in (*_ASKED, *SAMPLED)},
        **{name: value for name in _SINCE if (value := getattr(options, name)) not in (None, usual[name])},
        **({"default_max_new_tokens": MAX_NEW_TOKENS} if options.max_new_tokens is None else {}),
        **{name: settings.get(name) for name in (_OF_SERVER if "server" in settings else MAKES_TOKENS)},
    }

    def is_row(row: Row) -> bool:
        found = Scored.from_row(row) if "logprob" in row else Answer.from_row(row, [])
        return isinstance(row["index"], int) and isinstance(found.request, str)

    kept = PartialRows(options.output / PARTIAL, header, is_row, start_over="pass overwrite=True")
    if kept.path.exists() and not options.overwrite:
        kept.load()
    return kept


@contextmanager
def claimed(kept: PartialRows | None, overwrite: bool) -> Iterator[tuple[Mapping[int, Row], Callable[[Row], None]]]:
    """Lock the partial file, and yield its rows and a function that appends one. It is deleted if the block succeeds.
    An interruption reports how many answers are kept."""
    if kept is None:
        yield {}, lambda row: None
        return
    works = "the same command with this --out continues"
    with kept.claim(starts_over=overwrite) as keep:
        try:
            done = f"kept the finished answers ({{}}) in {kept.path}; {works}"
            with reporting(lambda: kept.or_lost(done.format(len(kept.rows)))):
                yield kept.rows, keep
        except KeyboardInterrupt as stop:
            if not kept.rows:
                kept.remove()
                stop.args = ()
            raise
        except FailedError as error:
            if not kept.rows:
                kept.remove()
                error.kept = None
            raise
        kept.remove()


def with_earlier(record: RunRecord, earlier: int, results: Sequence[Answer | Scored]) -> None:
    """Extend the record of a continued run, which covers the last run only, by the results of the earlier ones.

    As for `generate` (`records.store.load_output`), metrics that follow from the results cover all of them, and
    throughput and times are left out: the times between the runs are unknown.
    """
    record.workload[EARLIER] = earlier
    completions = [one.completion for one in results if isinstance(one, Answer)]
    scored = [one for one in results if isinstance(one, Scored)]
    if scored:
        tokens = sum(one.scored_tokens for one in scored)
        total = tokens + sum(one.prompt_tokens for one in scored)
        record.counters["scoring"] = {"requests": len(scored), "input_tokens": total, "scored_tokens": tokens}
    if not completions:
        record.requests = [one.numbers() for one in scored]
        record.metrics = record.counters["scoring"]
        return
    record.requests = [one.as_row() for one in completions]
    numbers = summarize(completions, 0.0)
    counts = [name for name in numbers if name == "requests" or (name in METRICS and not METRICS[name].is_time)]
    record.metrics = {name: numbers[name] for name in counts}
    record.counters["emitted_histogram"] = emitted_histogram(completions)
    record.counters["acceptance"] = total_acceptance(completions).as_counters()
