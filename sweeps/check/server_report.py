"""The report of a check of a server: verdict, divergences by condition, and a table of its settings."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specbatch.errors import counted
from specbatch.files.atomic_file import write_atomic
from specbatch.records.markdown import markdown_table
from specbatch.records.run_record import RunRecord
from specbatch.servers.replies import Shown
from specbatch.servers.server import Server
from specbatch.sweeps.check.compared import FAULT, MOST_NOISE, ROUNDING, UNJUDGED, Divergence, most_of
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.probe_requests import Probe
from specbatch.sweeps.check.prompts import left_out
from specbatch.sweeps.check.report import CheckReport
from specbatch.sweeps.check.verdict import noise_of
from specbatch.sweeps.report.heading import heading, run_on

_SHOWN = 20  # divergences in the table; the file has all
_MEANINGS = {
    "alone": "each prompt alone, prefix cache emptied",
    "again": "each prompt alone, a second time",
    "together": "all prompts at once",
}


@dataclass(frozen=True)
class Condition:
    """How the prompts were asked, and what their answers are against those that they should equal.

    compared    answers that both sides have
    errors      of requests that failed
    lost        errors of the other side's
    noises      the largest distance of log-probabilities before a divergence, by prompt
    """

    name: str
    compared: int
    errors: list[str]
    lost: list[str]
    divergences: list[Divergence]
    noises: list[float] = field(default_factory=list)

    def judged(self, bound: float, most: float) -> Condition:
        return replace(self, divergences=[one.judged(bound, most) for one in self.divergences])

    def only_shapes(self) -> Condition:
        """With the divergences only that are faults by their shape."""
        return replace(self, divergences=[one for one in self.divergences if one.shape])

    @property
    def is_faulty(self) -> bool:
        return any(one.verdict == FAULT for one in self.divergences)

    def fault(self) -> str:
        """The divergences that rounding does not explain, in words."""
        wrong = [one for one in self.divergences if one.verdict == FAULT]
        first = next((one for one in wrong if one.shape), wrong[0])
        shapes = Counter(re.sub(r" \(\d+\)$", "", one.shape) for one in wrong if one.shape)
        why = "; ".join(f"{shape} ({count})" for shape, count in shapes.items())
        return (
            f"{counted(len(wrong), 'answer')} of {self.compared} {'diverges' if len(wrong) == 1 else 'diverge'} beyond "
            f"rounding when asked {self.name} ({_MEANINGS[self.name]}), first in prompt {first.prompt} at token "
            f"{first.place}{f': {why}' if why else ''}"
        )


@dataclass(frozen=True)
class ServerReport:
    """The result of a check of a server.

    against     what its answers were compared with
    noises      distances of log-probabilities, by prompt and condition
    bound       nats that rounding explains
    referee     by condition, what the referee says of the server and of this engine, where weights are given
    """

    options: CheckOptions
    server: Server
    against: str
    shown: Shown
    conditions: list[Condition]
    noises: list[float]
    bound: float
    referee: dict[str, CheckReport]
    probes: list[Probe]
    record: RunRecord

    @property
    def faults(self) -> list[str]:
        """What makes the check fail, in words."""
        found = []
        failed = [error for one in self.conditions for error in one.errors]
        lost = self.conditions[0].lost
        for errors, whose in ((failed, ""), (lost, " of the other side")):
            if errors:
                most, _ = Counter(errors).most_common(1)[0]
                found.append(f"{counted(len(errors), 'request')}{whose} failed: {most}")
        found += [one.fault() for one in self.conditions if one.is_faulty]
        if not self.referee and noise_of(self.noises) > MOST_NOISE:
            found.append(
                f"log-probabilities of equal tokens differ by {noise_of(self.noises):.2g} nats, more than rounding does"
            )
        for name, report in self.referee.items():
            found += [f"{text} ({name})" for text in report.faults]
        for probe in self.probes:
            if probe.is_bad:
                state = "is ignored" if probe.result == "ignored" else "is wrong"
                found.append(f"{probe.name} {state}: {probe.detail}")
        return found

    @property
    def unjudged(self) -> int:
        return sum(one.verdict == UNJUDGED for condition in self.conditions for one in condition.divergences)

    @property
    def fails(self) -> bool:
        """A fault, or divergences that nothing judged."""
        return bool(self.faults) or self.unjudged > 0

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "against": self.against,
            "conditions": {
                one.name: {
                    "compared": one.compared,
                    "failed": len(one.errors),
                    **({} if self.referee else dict(Counter(each.verdict for each in one.divergences))),
                }
                for one in self.conditions
            },
            "referee": {name: report.summary() for name, report in self.referee.items()} or None,
            "noise": noise_of(self.noises) if self.noises else None,
            "bound": self.bound,
            "probes": [asdict(probe) for probe in self.probes],
            "unjudged": self.unjudged,
            "faults": self.faults,
        }

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**self.summary(), "rows": self._rows(), "metrics": self.record.metrics}

    def markdown(self) -> str:
        lines = run_on([self.record]) | {
            "server": f"{self.server.base_url}, prompts as {self.server.send}; it shows {self._shown()}",
            "against": self.against,
            "prompts": f"{self.record.workload['prompts']}, at most {self.options.max_new_tokens} tokens each, greedy, "
            f"up to {self.options.concurrency} at once{left_out(self.record)}",
        }
        parts = [heading(lines), self._verdict(), self._conditions(), self._divergences(), self._probes()]
        parts += [f"By the referee, {name}:\n\n{report.tests()}" for name, report in self.referee.items()]
        parts.append("\n".join(f"* {note}" for note in self._notes()))
        return "\n\n".join(part.rstrip("\n") for part in parts if part)

    def save(self, folder: Path) -> None:
        """Write record.json, requests.jsonl, divergences.jsonl and summary.md."""
        self.record.save(folder)
        write_atomic(folder / "divergences.jsonl", "".join(json.dumps(row) + "\n" for row in self._rows()))
        write_atomic(folder / "summary.md", self.markdown() + "\n")

    def _rows(self) -> list[dict[str, Any]]:
        if self.referee:
            return [
                {"condition": name, **item.row(report.dtype)}
                for name, report in self.referee.items()
                for item in report.findings
                if item.diverges
            ]
        return [asdict(one) for condition in self.conditions for one in condition.divergences]

    def _shown(self) -> str:
        found = [
            text for text, has in (("token ids", self.shown.ids), ("log-probabilities", self.shown.logprobs)) if has
        ]
        return " and ".join(found) or "text only"

    def _verdict(self) -> str:
        if self.faults:
            return f"FAILED: {'; '.join(self.faults)}."
        if self.unjudged:
            return (
                f"NOT JUDGED: {counted(self.unjudged, 'answer')} with other tokens. To tell rounding from a fault "
                "takes log-probabilities of both sides where they diverge, or of one that leave no doubt; --weights "
                "names a model that judges without."
            )
        compared = sum(one.compared for one in self.conditions)
        count = sum(len(one.divergences) for one in self.conditions)  # with a referee none, or there are faults
        count += sum(item.diverges for report in self.referee.values() for item in report.findings)
        text = f"PASSED: {compared - count} of {compared} answers are equal"
        text += f"; rounding explains the {counted(count, 'divergence')}" if count else ""
        tested = [probe for probe in self.probes if probe.result == "honored"]
        return f"{text}; {len(tested)} of {len(self.probes)} settings are honored." if self.probes else f"{text}."

    def _conditions(self) -> str:
        headers = ["asked", "compared", "equal", ROUNDING, FAULT, UNJUDGED, "failed"]
        body = []
        for one in self.conditions:
            verdicts = Counter(each.verdict for each in one.divergences)
            equal = one.compared - len(one.divergences)
            cells = [str(verdicts[kind]) for kind in (ROUNDING, FAULT, UNJUDGED)]
            if one.name in self.referee:
                equal = sum(not item.diverges for item in self.referee[one.name].findings)
                cells = ["by the referee"] * 3
            body.append(
                [f"{one.name}: {_MEANINGS[one.name]}", str(one.compared), str(equal), *cells, str(len(one.errors))]
            )
        return markdown_table(body, headers)

    def _divergences(self) -> str:
        parted = [one for condition in self.conditions for one in condition.divergences]
        if not parted:
            return ""
        headers = ["asked", "prompt", "equal tokens", "expected", "found", "gap (nats)", "verdict"]
        body = [
            [one.condition, str(one.prompt), str(one.place), _text(one.wanted), _text(one.found),
             "-" if one.gap is None else f"{one.gap:.3f}", _verdict_of(one)]
            for one in parted[:_SHOWN]
        ]  # fmt: skip
        more = f"\n\n{len(parted) - _SHOWN} more in divergences.jsonl." if len(parted) > _SHOWN else ""
        return f"First divergences:\n\n{markdown_table(body, headers)}{more}"

    def _probes(self) -> str:
        if not self.probes:
            return ""
        body = [[probe.name, probe.result, probe.detail] for probe in self.probes]
        return f"Settings:\n\n{markdown_table(body, ['setting', 'result', ''])}"

    def _notes(self) -> list[str]:
        notes = []
        if not self.referee and self.noises:
            notes.append(
                f"Rounding explains a gap of up to {self.bound:.2g} nats: 4 times the noise of "
                f"{noise_of(self.noises):.2g}, the second largest distance of log-probabilities before a divergence, "
                "and always 0.5. Assumed: the server's log-probabilities are those of its model."
            )
        alone = sum(bool(one.by) for condition in self.conditions for one in condition.divergences)
        if alone and not self.referee:
            notes.append(
                f"ONE SIDE SHOWS LOG-PROBABILITIES and alone judges {counted(alone, 'divergence')}, by the tokens with "
                "which the text of the other can go on."
            )
            if not self.noises:
                notes.append(
                    f"How much the sides round is not seen: rounding explains a gap of up to {self.bound:.2g} nats, "
                    f"more than {most_of([]):.2g} is a fault, and between them no verdict is possible."
                )
        if self.referee and self.record.workload["quantized"]:
            notes.append(
                "THE SERVER QUANTIZES weights or activations: its log-probabilities are not compared with this "
                "engine's errors, and a fault that changes them by no more than quantization does is not found."
            )
        elif any(report.faults for report in self.referee.values()):
            notes.append("If the server quantizes weights or activations, --quantized allows for that.")
        if not self.shown.ids and self.referee:
            notes.append("The server shows no token ids: the tokens of its texts were judged.")
        if not self.shown.logprobs:
            notes.append(
                "THE SERVER SHOWS NO LOG-PROBABILITIES: divergences are judged by those of the other side if it shows "
                "some, or with --weights, and penalties are not probed. Comparisons and the other probes work."
            )
        if (length := self.record.metrics.get("untrimmed_accept_length")) is not None:
            notes.append(f"The server drafted: {length:.2f} tokens per verify by its counters.")
        elif "own answers" in self.against:
            notes.append("The server's counters do not tell whether it drafted.")
        return notes


def _verdict_of(one: Divergence) -> str:
    by = f" by the log-probabilities of the {one.by} answer alone" if one.by and not one.shape else ""
    return f"{one.verdict}{by}{f': {one.shape}' if one.shape else ''}"


def _text(value: Any) -> str:
    return "the end" if value is None else f"`{value}`" if isinstance(value, int) else json.dumps(value)
