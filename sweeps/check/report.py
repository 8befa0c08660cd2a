"""The report of a check: verdict, distributions of both engines, and the prompts that diverge."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.errors import counted
from specbatch.files.atomic_file import write_atomic
from specbatch.records.markdown import acceptance_table, draft_length_lines, markdown_table
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.prompts import left_out
from specbatch.sweeps.check.verdict import (
    FACTOR,
    LEAST_PROMPTS,
    LEAST_UNITS,
    TOLERANCE,
    Excess,
    Places,
    bound_of,
    excess,
    noise_of,
)
from specbatch.sweeps.report.heading import heading, run_on
from specbatch.sweeps.report.point_notes import replay_note, unused_graphs

_SHOWN = 20  # prompts in the table; the file has all
_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, the engine's log-probabilities of them if it was asked for them, the referee's view of
    them if it judged them, and why the request failed if it did."""

    tokens: list[int]
    logprobs: list[float] | None = None
    places: Places | None = None
    error: str | None = None

    @property
    def below(self) -> float | None:
        """The mean of the logits below the referee's best."""
        return None if not self.places or not self.tokens else math.fsum(self.places.below) / len(self.tokens)

    @property
    def errors(self) -> list[float]:
        """Of the log-probabilities, where both are known."""
        if self.places is None or self.logprobs is None:
            return []
        return [abs(own - wanted) for own, wanted in zip(self.logprobs, self.places.logprobs, strict=True)]

    def gaps(self, dtype: str) -> list[float]:
        """The logits below the referee's best, in units in the last place of `dtype`; none if it did not judge."""
        return self.places.units(self.places.below, dtype) if self.places else []

    def noise(self, dtype: str) -> float:
        """The largest gap or error of a log-probability, in units in the last place of `dtype`."""
        errors = self.places.units(self.errors, dtype) if self.places and self.errors else []
        return max([*self.gaps(dtype), *errors], default=0.0)

    def at(self, place: int) -> dict[str, Any]:
        """The token at a place, and what the referee says of it; None where the answer has ended."""
        if place >= len(self.tokens):
            return {"token": None, "below": None}
        return {"token": self.tokens[place], "below": self.places.below[place] if self.places else None}


@dataclass(frozen=True)
class Finding:
    """One prompt: the number of tokens that are equal before the first divergence, if there is one, and both
    answers."""

    index: int
    id: str | int | None
    equal: int
    diverges: bool
    plain: Answer
    checked: Answer
    prompt: list[int]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        return self.plain, self.checked

    @property
    def ends_early(self) -> bool:
        """One answer ended where the other, equal until then, goes on: no end token was chosen."""
        return self.diverges and self.equal in map(len, (self.plain.tokens, self.checked.tokens))

    def worst(self, dtype: str) -> float:
        """The largest gap of the checked engine from the first divergence on, in units in the last place of `dtype`.
        Before it the baseline chose the same tokens."""
        return max(self.checked.gaps(dtype)[self.equal :], default=0.0)

    def row(self, dtype: str) -> dict[str, Any]:
        """Of prompts.jsonl."""
        return {
            "index": self.index,
            "id": self.id,
            "equal": self.equal,
            "diverges": self.diverges,
            "baseline": self.plain.at(self.equal) if self.diverges else None,
            "checked": self.checked.at(self.equal) if self.diverges else None,
            "noise_units": self.plain.noise(dtype) if self.plain.places else None,
            "worst_units": self.worst(dtype) if self.checked.places else None,
        }


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. record: of the engine that was checked."""

    options: CheckOptions
    findings: list[Finding]
    record: RunRecord

    @property
    def dtype(self) -> str:
        dtype: str = self.record.caps["dtype"]
        return dtype

    @cached_property
    def judged(self) -> list[Finding]:
        return [item for item in self.findings if item.plain.places is not None]

    @cached_property
    def below(self) -> Excess | None:
        """Of the logits below the best."""
        return self._excess(lambda answer: answer.below)

    @cached_property
    def errors(self) -> Excess | None:
        """Of the errors of log-probabilities."""
        return self._excess(lambda answer: float(np.mean(answer.errors)) if answer.errors else None)

    @cached_property
    def noise(self) -> float:
        """Of the baseline, in units in the last place."""
        return noise_of([item.plain.noise(self.dtype) for item in self.judged])

    @property
    def bound(self) -> float:
        """The largest gap that a token may have, in units in the last place."""
        return bound_of(self.noise, self.dtype)

    @cached_property
    def worst(self) -> float:
        """The largest gap of the checked engine where the baseline did not choose the same, in units in the last
        place."""
        return max((item.worst(self.dtype) for item in self.judged), default=0.0)

    @property
    def faults(self) -> list[str]:
        """What makes the check fail, in words."""
        found = self.failures()
        if self.errors is not None and self.errors.is_found:
            found.append("its log-probabilities are further from the referee's than the baseline's")
        if self.below is not None and self.below.is_found:
            found.append("its tokens are further below the referee's best than the baseline's")
        if self.worst > self.bound:
            found.append(
                f"a token is {self.worst:.4g} units in the last place below the referee's best, and rounding explains "
                f"{self.bound:.4g}"
            )
        return found

    def failures(self) -> list[str]:
        """Faults that no measure shows, in words: requests, divergences without a referee, missing end tokens."""
        found = []
        diverging = sum(item.diverges for item in self.findings)
        if errors := [side.error for item in self.findings for side in item.answers if side.error]:
            found.append(f"{counted(len(errors), 'request')} failed: {errors[0]}")
        if self.options.referee == "none":
            without = f"{counted(diverging, 'answer')} with other tokens, and no referee was asked"
            return [*found, without] if diverging else found
        if early := sum(item.ends_early for item in self.findings):
            found.append(f"{counted(early, 'answer')} ended without an end token")
        return found

    @property
    def fails(self) -> bool:
        return bool(self.faults)

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        tests = {"logprob_error": self.errors, "logits_below_best": self.below}
        return {
            "equal": sum(not item.diverges for item in self.findings),
            "diverging": sum(item.diverges for item in self.findings),
            "judged": len(self.judged),
            "worst_units": self.worst if self.judged else None,
            "bound_units": self.bound if self.judged else None,
            "tests": {name: asdict(test) if test else None for name, test in tests.items()},
            "faults": self.faults,
        }

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [item.row(self.dtype) for item in self.findings]
        return {"prompts": len(rows), **self.summary(), "rows": rows, "metrics": self.record.metrics}

    def markdown(self) -> str:
        """The setup, the verdict, both distributions, and the prompts that diverge."""
        record = self.record
        lines = run_on([record]) | {
            "checked": f"{Speculation(**record.config['speculation'])}, {Graphs(**record.config['graphs'])}",
            "against": "baseline, schedule v1, eager",
            "referee": self._referee(),
            "prompts": self._prompts(),
        }
        parts = [heading(lines), self._verdict(), self._distributions(), self.tests(), self._divergences()]
        parts.append(acceptance_table({(): [record.counters]}, sampling="greedy"))
        parts.append("\n".join(draft_length_lines([record.counters], record.caps)))
        parts.append("\n".join(f"* {note}" for note in self._notes()))
        return "\n\n".join(part.rstrip("\n") for part in parts if part)

    def save(self, folder: Path) -> None:
        """Write record.json, requests.jsonl, prompts.jsonl (a row per prompt) and summary.md."""
        self.record.save(folder)
        rows = (json.dumps(item.row(self.dtype)) + "\n" for item in self.findings)
        write_atomic(folder / "prompts.jsonl", "".join(rows))
        write_atomic(folder / "summary.md", self.markdown() + "\n")

    def _excess(self, measure: Callable[[Answer], float | None]) -> Excess | None:
        pairs = [(measure(item.plain), measure(item.checked)) for item in self.judged]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        return excess([a for a, _ in known], [b for _, b in known], self.dtype)

    def _referee(self) -> str:
        if self.options.referee == "none":
            return "none"
        kind, count = "float32" if self.options.referee == "float32" else self.dtype, len(self.judged)
        return f"the model in {kind}, without cache and drafts; it judged {count} prompt{'' if count == 1 else 's'}"

    def _prompts(self) -> str:
        options, work = self.options, self.record.workload
        if options.random:
            text = f"random, {options.input_len} tokens each, seed {work['seed']}; exactly"
        else:
            text = f"{options.source or 'those of the package'}; at most"
        return (
            f"{text} {options.max_new_tokens} tokens each, greedy, {options.concurrency} at once{left_out(self.record)}"
        )

    def _verdict(self) -> str:
        found = self.summary()
        text = f"{found['equal']} of {len(self.findings)} prompts have the baseline's tokens"
        text += f", {found['diverging']} diverge." if found["diverging"] else "."
        if self.faults:
            return f"FAILED: {'; '.join(self.faults)}. {text}"
        passed = "PASSED"
        if self.record.drafts and not self.record.metrics["drafted_tokens"]:
            passed = "PASSED, but nothing was drafted, so drafts were not tested"
        return f"{passed}: {text}" + (" Rounding explains the divergences." if found["diverging"] else "")

    def _distributions(self) -> str:
        if not self.judged:
            return ""
        headers = ["", "tokens", "mean", *(f"{100 * share:g}%" for share in _QUANTILES), "max"]
        body = []
        for side, name in enumerate(("baseline", "checked")):
            gaps = [gap for item in self.judged for gap in _places(item, side).below]
            body.append([f"logits below the best, {name}", *_row(gaps)])
        for side, name in enumerate(("baseline", "checked")):
            errors = [error for item in self.judged for error in item.answers[side].errors]
            if errors:
                body.append([f"error of log-probabilities, {name}", *_row(errors)])
        return markdown_table(body, headers)

    def tests(self) -> str:
        if not self.judged:
            return ""
        lines = []
        for name, test in (("Error of log-probabilities", self.errors), ("Logits below the best", self.below)):
            if test is not None:
                smallest = test.smallest
                ends = "" if smallest is None else f" Smallest detectable difference: {_number(smallest)}."
                lines.append(
                    f"* {name}: {_number(test.checked)} per token, and {_number(test.baseline)} of the baseline, over "
                    f"{counted(test.prompts, 'prompt')}. Up to {TOLERANCE:.0%} more is allowed; p = {test.p_value:.2g} "
                    f"for more than that.{ends}"
                )
        lines.append(
            f"* Worst token from a divergence on: {self.worst:.4g} units in the last place of {self.dtype} below the "
            f"best; the bound is {self.bound:.4g} ({FACTOR} times the baseline's noise of {self.noise:.4g}, and always "
            f"{LEAST_UNITS[self.dtype]:g})."
        )
        return "\n".join(lines)

    def _divergences(self) -> str:
        parted = [item for item in self.findings if item.diverges]
        if not parted:
            return ""
        headers = ["prompt", "equal tokens", "baseline", "below best", "checked", "below best"]
        body = []
        for item in parted[:_SHOWN]:
            sides = [side.at(item.equal) for side in item.answers]
            cells = [_shown(value) for side in sides for value in (side["token"], side["below"])]
            body.append([str(item.index if item.id is None else item.id), str(item.equal), *cells])
        more = f"\n\n{len(parted) - _SHOWN} more in prompts.jsonl." if len(parted) > _SHOWN else ""
        return f"First divergences, with the token that each engine chose:\n\n{markdown_table(body, headers)}{more}"

    def _notes(self) -> list[str]:
        record, notes = self.record, []
        diverges = any(item.diverges for item in self.findings)
        if self.judged:
            notes.append(
                "Logits below the best: the referee's highest logit minus that of the token which an engine chose, "
                "after the text that the engine had generated."
            )
        tested = [test.prompts for test in (self.errors, self.below) if test is not None]
        if self.judged and min(tested, default=0) < LEAST_PROMPTS:
            notes.append(
                f"FEW PROMPTS: with fewer than {LEAST_PROMPTS} that have log-probabilities (three quarters of all), a "
                "test cannot find anything; only the worst token decides."
            )
        if self.dtype == "float32" and diverges:
            notes.append("DIVERGENCES IN FLOAT32, where none are expected.")
        if self.options.random and self.dtype != "float32":
            notes.append(
                "Random token ids are far outside of what a trained model expects: in 16 bits even the baseline may "
                "choose tokens that are logits below the best. Use text to judge precision."
            )
        if diverges and record.caps["fp8_activations"] == "on":
            notes.append(
                "Activations were quantized to FP8: a last bit that a verify, chunks or graphs change can move an "
                "activation to the next FP8 value. --no-fp8-activations shows which divergences remain."
            )
        notes += (str(replay_note(graphs, "checked")) for graphs in unused_graphs(record))
        return notes


def _places(item: Finding, side: int) -> Places:
    places = item.answers[side].places
    assert places is not None
    return places


def _row(values: Sequence[float]) -> list[str]:
    if not values:
        return ["0"]
    quantiles = np.quantile(values, _QUANTILES, method="inverted_cdf").tolist()
    return [str(len(values)), *map(_number, [float(np.mean(values)), *quantiles, max(values)])]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}" if value < 1e-3 else f"{value:.4f}"


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
