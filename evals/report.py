"""The report of an evaluation: scores with standard errors, speed, and one row per question.

* score: the mean over the questions; stderr: sample standard deviation / sqrt(n) of one score by itself. To compare two
  runs on the same questions, pair them by question instead.
* unparsed: the share of scored answers in which the filter found nothing (`unparsed.py`). truncated: the share of
  answers that reached max_new_tokens; they are scored as they are.
* Tasks that score given texts (kind multiple_choice, loglikelihood or loglikelihood_rolling) generate nothing, so they
  have no such shares, no drafts and no token times. Their metrics are lm-eval's.
* The speed columns are defined in `specbatch.records.metrics`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from specbatch.config.speculation import Speculation
from specbatch.core.completion import INCOMPLETE
from specbatch.core.sampling_params import sampling_text
from specbatch.errors import counted, shown
from specbatch.evals.few_shot import few_shot_lines
from specbatch.files.atomic_file import write_atomic
from specbatch.records.answers import QUESTIONS, EvalAnswers
from specbatch.records.markdown import acceptance_table, draft_length_lines, markdown_table
from specbatch.records.metrics import METRICS
from specbatch.records.reasoning import PARTS, parts_table, reasons
from specbatch.records.run_record import RunRecord
from specbatch.records.store import EARLIER

# The metrics of the speed table, of tasks that generate answers and of tasks that score given texts.
GENERATING = ("accept_length", "accept_rate", "mean_ttft_s", "mean_queue_s", "mean_tpot_s", "output_throughput")
CORPUS = ("corpus_share", "corpus_accept_length")
BUDGET = ("rows_per_verify",)
SCORING = ("scored_tokens", "input_throughput")


@dataclass(frozen=True, kw_only=True)
class EvalReport(EvalAnswers):
    """The result of `run_eval`.

    questions       one row per answer: doc_id, repeat, question, target, text, token_ids, filtered and scores by
                    filter, finish_reason, prompt_hash, and the metrics of the request. Tasks that score given texts
                    have one row per question: doc_id, question, target, prompt_hash, scores by filter, and those of
                    `likelihoods.likelihood_fields`
    kind            lm-eval's output type; of a group with several, all of them, separated by commas
    num_fewshot     by task where the tasks of a group differ
    max_new_tokens  None unless the task generates
    sampling        how the answers were generated, as `core.sampling_params.sampling_of` returns it; None: greedy
    warning         about the few-shot examples; "" without one
    notes           what users should know about this run, one sentence each without the full stop
    predict_only    whether the answers were not scored
    cut             number of texts longer than the model's context, which lost their beginning; None if the task
                    generates
    record          the engine's record of the run; its `workload` holds the fields below
    """

    task_version: str
    lm_eval_version: str
    data_source: str
    num_fewshot: int | Mapping[str, int]
    fewshot_source: str
    seed: int
    limit: float | None
    chat_template: bool
    prompts_sha256: str
    thinking: bool | None = None
    think_end_token: str | None = None
    max_new_tokens: int | None = None
    sampling: dict[str, float] | None = None
    cut: int | None = None
    warning: str = ""
    notes: Sequence[str] = ()
    offset: int = 0
    samples: Mapping[str, Sequence[int]] | None = None
    predict_only: bool = False
    system_instruction: str | None = None
    gen_kwargs: str | None = None
    fewshot_as_multiturn: bool | None = None
    add_bos_token: bool | None = None
    truncate_prompts: bool = False

    def settings(self) -> dict[str, Any]:
        """Everything except the rows and the record, in the form that `load` reads."""
        left_out = {"scores", "questions", "record"}
        left_out |= set() if self.scores_texts else {"cut"}
        left_out |= set() if self.generates else {"max_new_tokens", "sampling"}
        kept = [item.name for item in fields(self) if item.name not in left_out]
        return {name: getattr(self, name) for name in kept} | {"scores": [asdict(score) for score in self.scores]}

    def as_dict(self) -> dict[str, Any]:
        """The report without its rows, ready for JSON."""
        shares = {"truncated": self.truncated, "finish_reasons": self.finish_reasons} if self.generates else {}
        return {**self.settings(), **shares, "metrics": self.record.metrics}

    def table(self) -> str:
        """Markdown: scores, speed, and what they were measured on."""
        scores = [markdown_table(self.score_cells())] if self.scores else []
        return "\n\n".join([*scores, self.details()])

    def score_cells(self) -> list[dict[str, str]]:
        """The rows of the table of scores."""
        return [
            {
                "task": score.task or self.task,
                "filter": score.filter,
                "metric": score.metric if score.better == "higher" else f"{score.metric} (lower is better)",
                "score": f"{score.value:.4f}",
                "stderr": _number(score.stderr, ".4f"),
                "n": str(score.n),
                "unparsed": _number(score.unparsed, ".1%"),
            }
            for score in self.scores
        ]

    def details(self) -> str:
        """Markdown: speed, and what it was measured on."""
        parts = [markdown_table([cells]) for cells in self.speed_cells()]
        if self.generates:
            parts.append(acceptance_table({(): [self.record.counters]}, sampling=sampling_text(self.sampling)))
            parts.append(parts_table({(): [self.record]}))
            parts.append("\n".join(draft_length_lines([self.record.counters], self.record.caps)))
            parts.append(few_shot_lines(self.scores, self.record))
        return "\n\n".join([*filter(None, parts), "\n".join(self._notes())])

    @property
    def examples(self) -> str:
        """How many few-shot examples there were, and from where."""
        counts = self.num_fewshot
        number = counts if isinstance(counts, int) else ", ".join(map(str, sorted({*counts.values()})))
        return f"{number} from {self.fewshot_source}" if number else "none"

    @property
    def sampled(self) -> str:
        """How the answers were sampled, with the engine's seed, which they depend on."""
        text = sampling_text(self.sampling)
        is_sampled = bool(self.sampling and self.sampling["temperature"])
        return f"{text}, seed {self.record.config['seed']}" if is_sampled else text

    def speed_cells(self) -> Iterator[dict[str, str]]:
        """Columns of the speed tables: of answers, and of texts that were scored."""
        if self.generates:
            answers = sum("finish_reason" in row for row in self.questions)
            shares = {"answers": str(answers), "truncated": f"{self.truncated:.1%}"}
            asked = self.record.config["speculation"]
            of_corpus = CORPUS if asked.get("corpus") else ()
            of_budget = BUDGET if asked.get("verify_budget") else ()
            yield shares | cells_of(self.record, (*GENERATING, *of_budget, *of_corpus))
        if self.scores_texts:
            numbers = self.record.counters.get("scoring", self.record.metrics)
            questions = sum("finish_reason" not in row for row in self.questions)
            texts = {"questions": str(questions), "texts": f"{numbers['requests']:.0f}"}
            yield texts | cells_of(replace(self.record, metrics=numbers), SCORING)

    def _notes(self) -> Iterator[str]:
        """Lines below the tables: model, data and settings."""
        config, caps, metrics = self.record.config, self.record.caps, self.record.metrics
        form = "chat template" if self.chat_template else "plain text"
        if self.chat_template and self.num_fewshot and self.fewshot_as_multiturn is False:
            form += ", examples in one turn"
        if self.system_instruction:
            form += f", system instruction {shown(self.system_instruction)}"
        if self.add_bos_token is not None:
            form += f", {'with' if self.add_bos_token else 'without'} an added bos token"
        if self.thinking is not None:
            form += f", thinking {'on' if self.thinking else 'off'}"
        if self.think_end_token is not None:
            form += f", scored after {self.think_end_token!r}"
        is_known = "server" not in config or config["speculation_known"]
        by = f" Speculation: {Speculation(**config['speculation'])}." if is_known else ""
        answers = f" Answers: up to {self.max_new_tokens} tokens, {self.sampled}."
        if self.gen_kwargs is not None:
            answers += f" gen_kwargs: {self.gen_kwargs}."
        if self.generates and self.scores_texts:
            answers += " Given texts were scored without drafts."
        elif not self.generates:
            by, answers = " Given texts were scored; nothing was generated or drafted.", ""
        replicas = f" in {self.record.replicas} replicas" if self.record.replicas > 1 else ""
        mode = ", deterministic" if self.record.is_deterministic else ""
        if server := config.get("server"):
            yield f"Model: {config['model']} of a {server}.{by}"
        else:
            yield f"Model: {config['model']}, {caps['dtype']} on {caps['device']}{replicas}{mode}.{by}"
        part = f", from question {self.offset} on" if self.offset else ""
        yield f"Data: {self.data_source}{part}. Few-shot examples: {self.examples}."
        if self.warning:
            yield f"Warning: {self.warning}."
        for note in self.notes:
            yield f"Note: {note}."
        yield (
            f"Prompts: {form}, sha256 {self.prompts_sha256[:16]}, seed {self.seed}.{answers} "
            f"lm-eval {self.lm_eval_version}, task version {self.task_version}."
        )
        if self.cut:
            most = caps["max_model_len"]
            yield f"{counted(self.cut, 'text')} lost the beginning, because of max_model_len={most}."
        if metrics.get("cached_tokens"):
            cached = f"{metrics['cached_tokens']:.0f} of {metrics['input_tokens']:.0f}"
            yield f"{cached} prompt tokens came from the prefix cache."
        if earlier := self.record.workload.get(EARLIER):
            texts = "texts" if not self.generates else "results" if self.scores_texts else "answers"
            total = len(self.record.requests)
            total += self.record.counters["scoring"]["requests"] if texts == "results" else 0
            yield f"{earlier} of {total} {texts} come from an interrupted run: throughput and times are unknown."
        if self.generates and (incomplete := sum(self.finish_reasons.get(reason, 0) for reason in INCOMPLETE)):
            yield f"{counted(incomplete, 'incomplete answer')}, scored without the rest."

    def save(self, folder: Path) -> None:
        """Write record.json, requests.jsonl, questions.jsonl, summary.md and summary.csv into an existing folder, the
        record last."""
        for name, content in self.files().items():
            write_atomic(folder / name, content)
        self.record.save(folder)

    def files(self) -> dict[str, str]:
        """The files beside the record, by name: questions.jsonl, summary.md and summary.csv."""
        import pandas

        return {
            QUESTIONS: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.questions),
            "summary.md": self.table() + "\n",
            "summary.csv": pandas.DataFrame(self.flat()).to_csv(index=False),
        }

    def flat(self) -> list[dict[str, Any]]:
        """One row per score, with everything in the tables."""
        settings = {name: value for name, value in self.settings().items() if name != "scores"}
        metrics = self.record.metrics
        if not self.generates:
            shown: tuple[str, ...] = ("scored_tokens", "input_throughput")
            generated: dict[str, Any] = {}
        else:
            shown = ("accept_length", "accept_rate", "mean_ttft_s", "mean_tpot_s", "output_throughput")
            generated = {"truncated": self.truncated, "simulated_accept_length": self.record.simulated_accept_length}
        if reasons([self.record]):
            shown += PARTS
        generated |= {name: metrics.get(name) for name in shown}
        return [{**asdict(score), **generated, **settings, "task": score.task or self.task} for score in self.scores]


def cells_of(record: RunRecord, keys: tuple[str, ...]) -> dict[str, str]:
    """Metrics of a record as cells, by heading."""
    metrics = [METRICS[key] for key in keys]
    return {metric.heading: metric.text(metric.read(record)) for metric in metrics}


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
