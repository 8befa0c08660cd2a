"""`specbatch check --sampled`: sampled tokens against the exact distribution.

Many requests with seeds of their own continue the same few prompts by some tokens. The first token comes from the
prefill and the others from verifies, so each is counted given the tokens before it: after every text that enough
requests have generated, the referee's logits give the exact distribution of the next token under temperature, top-k,
top-p and min-p. A rule that accepts too much, or that replaces a rejected draft wrongly, changes the tokens after the
first one. Chi-square statistics of independent counts add up to one test for the first tokens and one for the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import counted
from specbatch.files.atomic_file import write_atomic
from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.progress.bars import Report
from specbatch.records.estimates import holm
from specbatch.records.markdown import acceptance_table, markdown_table
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.check import prompts as check_prompts
from specbatch.sweeps.check.chi_square import ChiSquare, of_counts, smallest_distance, total
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.referee import Referee, plan_referee
from specbatch.sweeps.check.run import Progress, refuse_simulated
from specbatch.sweeps.check.verdict import ALPHA, POWER
from specbatch.sweeps.report.heading import heading, run_on
from specbatch.sweeps.run.loading import load_engine

# Requests of one batch share its kernels, so the first runs without filters, the others together.
SAMPLING: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
)
_DEEPEST = 6  # tokens per request; fewer where a verify yields fewer
LEAST_SAMPLES = 30  # requests with the same text, below which the token after it is not tested

Text = tuple[int, ...]


@dataclass(frozen=True)
class Tested:
    """The tests of one set of sampling parameters.

    first, later     the statistics of first tokens and of those after them
    samples          tokens that each of the two counted
    """

    sampling: dict[str, float]
    first: ChiSquare
    later: ChiSquare
    samples: tuple[int, int]

    def rows(self) -> list[dict[str, Any]]:
        """Ready for JSON, a row per test."""
        return [
            {
                "sampling": self.sampling,
                "tokens": name,
                "samples": count,
                "statistic": test.statistic,
                "freedom": test.freedom,
                "p_value": test.p_value,
                "smallest_distance": smallest_distance(test.freedom, count, ALPHA, POWER) if test.freedom else None,
            }
            for name, test, count in zip(("first", "later"), (self.first, self.later), self.samples, strict=True)
        ]


def rows_of(tested: Sequence[Tested]) -> list[dict[str, Any]]:
    """The rows of all tests, with whether each deviates among as many."""
    found = [row for item in tested for row in item.rows()]
    wrong = [p <= ALPHA for p in holm([row["p_value"] for row in found])]
    return [row | {"deviates": deviates} for row, deviates in zip(found, wrong, strict=True)]


@dataclass(frozen=True)
class SampledReport:
    """The result of a check of sampled tokens. record: of the engine."""

    options: CheckOptions
    tested: list[Tested]
    record: RunRecord

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.tested)

    @property
    def untested(self) -> str | None:
        """Why no token of a verify was tested; without drafts, no token after the first."""
        drafts = self.record.drafts
        if drafts and not self.record.metrics["drafted_tokens"]:
            return "nothing was drafted; use prompts that repeat themselves, or another draft"
        if any(item.later.freedom for item in self.tested):
            return None
        return (
            f"no token {'of a verify' if drafts else 'after the first'} was counted, which needs {LEAST_SAMPLES} "
            "requests with the same tokens before it; use more --seeds, or prompts with a likelier next token"
        )

    @property
    def fails(self) -> bool:
        """A distribution is wrong, or nothing was tested."""
        return self.untested is not None or any(row["deviates"] for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "deviating": sum(row["deviates"] for row in self.rows),
            "untested": self.untested,
            "rows": self.rows,
            "metrics": self.record.metrics,
        }

    def markdown(self) -> str:
        record, work = self.record, self.record.workload
        dtype = "float32" if self.options.referee == "float32" else record.caps["dtype"]
        lines = run_on([record]) | {
            "checked": f"{Speculation(**record.config['speculation'])}, {Graphs(**record.config['graphs'])}",
            "against": f"the exact distribution by the model in {dtype}, without cache and drafts",
            "prompts": f"{work['prompts']} from {self.options.source or 'the package'}, each with {self.options.seeds} "
            f"seeds for every set of parameters; {work['tokens']} tokens each{check_prompts.left_out(record)}",
        }
        parts = [heading(lines), self._verdict(), table_of(self.rows), self._notes()]
        parts.append(acceptance_table({(): [record.counters]}, sampling="sampled"))
        return "\n\n".join(part.rstrip("\n") for part in parts if part)

    def save(self, folder: Path) -> None:
        """Write record.json, requests.jsonl and summary.md."""
        self.record.save(folder)
        write_atomic(folder / "summary.md", self.markdown() + "\n")

    def _verdict(self) -> str:
        wrong = [f"{text_of(row['sampling'])} ({row['tokens']} tokens)" for row in self.rows if row["deviates"]]
        if wrong:
            return f"FAILED: the distribution of sampled tokens is wrong with {'; '.join(wrong)}."
        if self.untested:
            return f"NOT TESTED: {self.untested}."
        count = sum(row["freedom"] > 0 for row in self.rows)
        return f"PASSED: no deviation from the exact distribution in {counted(count, 'test')}."

    def _notes(self) -> str:
        return "\n".join(
            [
                f"* Chi-square tests, together at a significance level of {ALPHA:g} (Holm). Cells: degrees of freedom; "
                "tokens that are expected fewer than 5 times share one.",
                f"* Smallest distance: any distribution that is further from the exact one, in total variation, is "
                f"found with a probability of at least {POWER:.0%}.",
            ]
        )


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    headers = ["sampling", "tokens", "samples", "cells", "p-value", "smallest distance", "verdict"]
    body = [
        [
            text_of(row["sampling"]),
            row["tokens"],
            str(row["samples"]),
            str(row["freedom"]),
            f"{row['p_value']:.2g}" if row["freedom"] else "-",
            f"{row['smallest_distance']:.3f}" if row["freedom"] else "-",
            "DEVIATES" if row["deviates"] else "as expected" if row["freedom"] else "nothing to test",
        ]
        for row in rows
    ]
    return markdown_table(body, headers)


def run_sampled(
    config: EngineConfig,
    options: CheckOptions,
    folder: Path,
    *,
    log: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> SampledReport:
    """Compare the sampled tokens of the engine of `config` with their exact distribution, and write what was found into
    `folder`, which exists. Refused: simulated acceptance; a referee that does not fit."""
    refuse_simulated(config)
    rows = check_prompts.read(options, log)
    plan = plan_referee(config, options.referee)
    with load_engine("checked", config, log, weights_of=None) as engine:
        prompts, _ = check_prompts.encode(rows, options, engine, config.seed)
        count = min(engine.caps["verify_rows"] + 1, _DEEPEST)
        progress = Progress(report, len(SAMPLING) * len(prompts) * options.seeds)
        work = [(place, index) for place in range(len(SAMPLING)) for index in range(len(prompts))]
        answers: dict[tuple[int, int], list[Text]] = {}
        for together in ([pair for pair in work if not pair[0]], [pair for pair in work if pair[0]]):
            requests = [(pair, seed) for pair in together for seed in range(options.seeds)]
            done = engine.generate(
                [prompts[index] for (_, index), _ in requests],
                [_params(place, work.index((place, index)), seed, count, options, config.seed)
                 for (place, index), seed in requests],
                concurrency=options.concurrency,
                on_completion=progress,
            )  # fmt: skip
            for (pair, _), item in zip(requests, done, strict=True):
                answers.setdefault(pair, []).append(_tokens(item))
        record = engine.record(concurrency=options.concurrency)
    if log is not None:
        log(f"referee: {str(plan.dtype).removeprefix('torch.')} on {plan.device}")
    exact = Exact(Referee(plan, max(map(len, prompts)) + count), prompts)
    tested = [
        test_of(sampling, [answers[place, index] for index in range(len(prompts))], exact, count)
        for place, sampling in enumerate(SAMPLING)
    ]
    result = SampledReport(options, tested, record)
    record.workload = {
        **check_prompts.describe(options, prompts, config.seed, None if rows is None else len(rows)),
        "tokens": count,
        "tests": result.rows,
    }
    result.save(folder)
    return result


def _params(place: int, number: int, seed: int, count: int, options: CheckOptions, first: int) -> SamplingParams:
    values: dict[str, Any] = dict(SAMPLING[place])
    own = (first + number * options.seeds + seed) % 2**63
    return SamplingParams(**values, seed=own, max_new_tokens=count, ignore_eos=True)


def _tokens(item: Completion) -> Text:
    return tuple(item.token_ids)


class Exact:
    """The exact distribution of the token after a prompt and a text."""

    def __init__(self, referee: Referee, prompts: list[list[int]]) -> None:
        self._referee = referee
        self._prompts = prompts
        self._logits: dict[tuple[int, Text], torch.Tensor] = {}

    def chances(self, prompt: int, text: Text, sampling: dict[str, float]) -> torch.Tensor:
        """float32 [V]."""
        if (prompt, text) not in self._logits:
            self._logits[prompt, text] = self._referee.next_logits([*self._prompts[prompt], *text])
        usual = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0} | sampling
        filters = (torch.tensor([usual[name]]) for name in ("temperature", "top_k", "top_p", "min_p"))
        return probabilities_ref(self._logits[prompt, text][None], *filters)[0]


def test_of(sampling: dict[str, float], answers: Sequence[list[Text]], exact: Exact, count: int) -> Tested:
    """answers: by prompt."""
    found: tuple[list[ChiSquare], list[ChiSquare]] = [], []
    samples = [0, 0]
    for prompt, texts in enumerate(answers):
        for depth in range(count):
            after: dict[Text, Counter[int]] = defaultdict(Counter)
            for text in texts:
                if len(text) > depth:
                    after[text[:depth]][text[depth]] += 1
            for text, tokens in after.items():
                if tokens.total() < LEAST_SAMPLES:
                    continue
                chances = exact.chances(prompt, text, sampling)
                counts = torch.zeros(len(chances))
                counts[list(tokens)] = torch.tensor(list(tokens.values())).float()
                test = of_counts(counts, chances)
                if test.freedom:
                    found[depth > 0].append(test)
                    samples[depth > 0] += tokens.total()
    return Tested(sampling, total(found[0]), total(found[1]), (samples[0], samples[1]))


def text_of(sampling: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())
