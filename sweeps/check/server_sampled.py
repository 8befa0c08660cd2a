"""`specbatch check --sampled --engine http`: sampled tokens of a server against their exact distribution.

As `specbatch.sweeps.check.sampled`. Without weights the distribution is the server's own: the log-probabilities of its
most likely tokens after every text that enough requests have generated, all other tokens being one cell. That finds a
sampler that departs from them, not a model that is wrong.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError, counted
from specbatch.files.atomic_file import write_atomic
from specbatch.progress.bars import Report
from specbatch.records.run_record import RunRecord
from specbatch.servers.engine import HttpEngine
from specbatch.servers.replies import Reply, Shown, Token
from specbatch.servers.server import Server
from specbatch.sweeps.check import prompts as check_prompts
from specbatch.sweeps.check.chi_square import ChiSquare, of_counts, total
from specbatch.sweeps.check.options import CheckOptions, ServerOptions
from specbatch.sweeps.check.referee import Referee, plan_referee
from specbatch.sweeps.check.run import Log, Progress
from specbatch.sweeps.check.sampled import (
    LEAST_SAMPLES,
    SAMPLING,
    Exact,
    Tested,
    rows_of,
    table_of,
    test_of,
    text_of,
)
from specbatch.sweeps.check.server import ANSWERS, Requests, prompts_of, shown_by
from specbatch.sweeps.report.heading import heading, run_on

TOKENS = 4  # per request
# Without weights: distributions that the most likely tokens at temperature 1 determine.
_KNOWN = ({"temperature": 1.0}, {"temperature": 1.5, "top_k": 4})


@dataclass(frozen=True)
class ServerSampledReport:
    """The result.

    failed   errors of requests
    refused  sets of sampling parameters that the server does not accept, with its reason
    """

    options: CheckOptions
    server: Server
    against: str
    tested: list[Tested]
    failed: list[str]
    refused: list[tuple[dict[str, float], str]]
    record: RunRecord

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.tested)

    @property
    def faults(self) -> list[str]:
        wrong = [f"{text_of(row['sampling'])} ({row['tokens']} tokens)" for row in self.rows if row["deviates"]]
        found = [f"the distribution of sampled tokens is wrong with {'; '.join(wrong)}"] if wrong else []
        if self.failed:
            most, _ = Counter(self.failed).most_common(1)[0]
            found.append(f"{counted(len(self.failed), 'request')} failed: {most}")
        return found

    @property
    def is_tested(self) -> bool:
        return any(row["freedom"] for row in self.rows)

    @property
    def fails(self) -> bool:
        """A distribution is wrong, a request failed, or nothing was tested."""
        return bool(self.faults) or not self.is_tested

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "against": self.against,
            "faults": self.faults,
            "refused": self.refused,
            "rows": self.rows,
            "metrics": self.record.metrics,
        }

    def markdown(self) -> str:
        work = self.record.workload
        lines = run_on([self.record]) | {
            "server": f"{self.server.base_url}, prompts as {self.server.send}",
            "against": self.against,
            "prompts": f"{work['prompts']}, each with {self.options.seeds} seeds for every set of parameters; "
            f"{TOKENS} tokens each{check_prompts.left_out(self.record)}",
        }
        left = [f"Not tested: the server refuses {text_of(sampling)} ({why})." for sampling, why in self.refused]
        return "\n\n".join([heading(lines).rstrip("\n"), self._verdict(), *left, table_of(self.rows)])

    def save(self, folder: Path) -> None:
        """Write record.json, requests.jsonl and summary.md."""
        self.record.save(folder)
        write_atomic(folder / "summary.md", self.markdown() + "\n")

    def _verdict(self) -> str:
        if self.faults:
            return f"FAILED: {'; '.join(self.faults)}."
        if not self.is_tested:
            return f"NOT TESTED: no token had {LEAST_SAMPLES} requests with the same text before it; use more --seeds."
        count = sum(row["freedom"] > 0 for row in self.rows)
        return f"PASSED: no deviation from the distribution in {counted(count, 'test')}."


def run_server_sampled(
    engine: HttpEngine,
    options: CheckOptions,
    server: ServerOptions,
    folder: Path,
    *,
    own: EngineConfig | None = None,
    seed: int = 0,
    log: Log | None = None,
    report: Report | None = None,
) -> ServerSampledReport:
    """Test the distribution of a server's sampled tokens, and write what was found into `folder`, which exists. Raises
    SpecbatchError for a server that does not show what the test needs."""
    plan = None if own is None else plan_referee(own, options.referee)
    prompts, _, read = prompts_of(engine, options, seed, log)
    shown = shown_by(engine, prompts[0])
    _refuse_hidden(engine, shown, with_weights=own is not None)
    sets = SAMPLING if plan is not None else _KNOWN
    progress = Progress(report, len(sets) * len(prompts) * options.seeds)
    engine.reset_record()
    answers: list[list[list[Reply]]] = []  # by set and prompt
    refused: list[tuple[dict[str, float], str]] = []
    with (folder / ANSWERS).open("w") as file:
        requests = Requests(prompts, file, progress)
        for place, sampling in enumerate(sets):
            usual = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
            sent = []
            for number in range(len(prompts) * options.seeds):
                prompt, own_seed = number // options.seeds, seed + place * len(prompts) * options.seeds + number
                sent.append((prompt, {**usual, **sampling, "seed": own_seed % 2**31, **shown.fields}))
            found = requests.replies(engine, f"sampled {place}", sent[:1], 1)
            if found[0].is_refused:  # as vLLM with drafts refuses min_p
                refused.append((sampling, str(found[0].error)))
                progress.more(1 - len(sent))
                continue
            found += requests.replies(engine, f"sampled {place}", sent[1:], options.concurrency)
            answers.append([found[at : at + options.seeds] for at in range(0, len(found), options.seeds)])
    sets = tuple(one for one in sets if one not in [other for other, _ in refused])
    if not sets or sets[0] != SAMPLING[0]:
        raise SpecbatchError(f"the server at {engine.server.base_url} refuses sampled requests: {refused[0][1]}")
    failed = [reply.error for of_set in answers for of_prompt in of_set for reply in of_prompt if reply.error]
    good = [[[reply for reply in of_prompt if not reply.error] for of_prompt in of_set] for of_set in answers]
    if plan is not None:
        exact = Exact(Referee(plan, max(map(len, prompts)) + TOKENS), prompts)
        tested = [
            test_of(sampling, [[tuple(reply.ids) for reply in found] for found in of_set], exact, TOKENS)
            for sampling, of_set in zip(sets, good, strict=True)
        ]
        against = f"the exact distribution of {plan.config.model}; assumed: these are the server's weights"
    else:
        known = _most_likely(good[0])
        tested = [_by_server(sampling, of_set, known) for sampling, of_set in zip(sets, good, strict=True)]
        against = (
            "the server's own log-probabilities of its most likely tokens; assumed: they are those of its model before "
            "temperature and filters. --weights tests against the model"
        )
    record = engine.record(concurrency=options.concurrency)
    record.workload = {
        **check_prompts.describe(options, prompts, seed, read),
        "weights": server.weights,
    }
    result = ServerSampledReport(options, engine.server, against, tested, failed, refused, record)
    record.workload |= {"tests": result.rows, "faults": result.faults, "refused": refused}
    result.save(folder)
    return result


def _refuse_hidden(engine: HttpEngine, shown: Shown, *, with_weights: bool) -> None:
    url = engine.server.base_url
    if with_weights and not shown.ids:
        raise SpecbatchError(
            f"the server at {url} shows no token ids, which sampled=True with weights='MODEL' needs; without weights "
            "it needs log-probabilities, and a check of greedy answers needs neither"
        )
    if not with_weights and not shown.logprobs:
        raise SpecbatchError(
            f"the server at {url} shows no log-probabilities, which sampled=True needs; with weights='MODEL' it needs "
            "token ids, and a check of greedy answers needs neither"
        )


_Known = dict[tuple[int, tuple[Token, ...]], dict[Token, float]]  # by prompt and text


def _most_likely(answers: Sequence[list[Reply]]) -> _Known:
    """The log-probabilities of the most likely tokens after each text. Only those at temperature 1 are asked, because
    some servers scale them by the temperature."""
    found: _Known = {}
    for prompt, replies in enumerate(answers):
        for reply in replies:
            for depth, top in enumerate(reply.top):
                if top:
                    found.setdefault((prompt, tuple(reply.pieces[:depth])), top)
    return found


def _by_server(sampling: dict[str, float], answers: Sequence[list[Reply]], known: _Known) -> Tested:
    """The tests of one set against the server's most likely tokens after each text."""
    found: tuple[list[ChiSquare], list[ChiSquare]] = [], []
    samples = [0, 0]
    for prompt, replies in enumerate(answers):
        for depth in range(TOKENS):
            after: dict[tuple[Token, ...], list[Token]] = defaultdict(list)
            for reply in replies:
                if len(reply.pieces) > depth:
                    after[tuple(reply.pieces[:depth])].append(reply.pieces[depth])
            for text, tokens in after.items():
                top = known.get((prompt, text))
                if len(tokens) < LEAST_SAMPLES or top is None:
                    continue
                test = of_counts(*_cells(tokens, top, sampling))
                if test.freedom:
                    found[depth > 0].append(test)
                    samples[depth > 0] += len(tokens)
    return Tested(sampling, total(found[0]), total(found[1]), (samples[0], samples[1]))


def _cells(
    tokens: Sequence[Token], top: dict[Token, float], sampling: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and probabilities of the most likely tokens, and of all others together."""
    most = int(sampling.get("top_k", 0))
    best = sorted(top, key=lambda token: -top[token])[: most or len(top)]
    counts = Counter(tokens)
    seen = [counts.pop(token, 0) for token in best]
    chances = [math.exp(top[token] / sampling["temperature"]) for token in best]
    rest = 0.0 if most else max(0.0, 1 - math.fsum(chances))
    return torch.tensor([*seen, counts.total()]).float(), torch.tensor([*chances, rest])
