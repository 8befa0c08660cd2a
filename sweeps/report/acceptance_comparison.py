"""The same drafter in several engines: accept length and acceptance by draft position of each, the differences with
their intervals, and what may have made them.

Pairs are prompts that both engines answered; where at least ten answers are the same, only those: then the text is no
reason. Intervals are those of `specbatch.records.intervals`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.algorithms import NO_SPECULATION
from specbatch.errors import refuse
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.markdown import markdown_table
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.acceptance_reasons import reasons
from specbatch.sweeps.report.prompt_acceptance import (
    Change,
    Difference,
    Pairing,
    Side,
    counted_sides,
    difference,
    paired,
    sides_of,
)

_DECIMALS = {"": 3, "%": 1}


@dataclass(frozen=True)
class Line:
    """One number of a table: its name, its unit ("" or "%"), and its change to each of the other engines."""

    name: str
    unit: str
    changes: list[Change | None]

    @property
    def cells(self) -> list[str]:
        first = next((one.before for one in self.changes if one is not None), None)
        found = [self._text(first)]
        for one in self.changes:
            found += ["-", "-"] if one is None else [self._text(one.after), self._difference(one)]
        return [self.name, *found]

    def _text(self, value: float | None, sign: str = "") -> str:
        scale = 100 if self.unit else 1
        return "-" if value is None else f"{scale * value:{sign}.{_DECIMALS[self.unit]}f}"

    def _difference(self, one: Change) -> str:
        if one.before is None or one.after is None:
            return "-"
        low, high = one.interval.low, one.interval.high
        ends = "" if low is None else f" ({self._text(low, '+')} to {self._text(high, '+')})"
        return self._text(one.value, "+") + ends


@dataclass(frozen=True)
class AcceptanceComparison:
    """The engines, of which the first is the base of the differences."""

    pairing: Pairing
    sides: list[Side]
    differences: list[Difference]

    @property
    def lines(self) -> list[Line]:
        found = [Line("accept length", "", [one.length for one in self.differences])]
        found.append(Line("drafts per verify", "", [one.drafts for one in self.differences]))
        for place in range(max(len(one.positions) for one in self.differences)):
            changes = [one.positions[place] if place < len(one.positions) else None for one in self.differences]
            found.append(Line(f"draft {place + 1} accepted where tried (%)", "%", list(changes)))
        for start in sorted({start for one in self.differences for start in one.contexts}):
            found.append(
                Line(f"accept length after {start}+ tokens", "", [one.contexts.get(start) for one in self.differences])
            )
        return [line for line in found if any(one is not None and one.after is not None for one in line.changes)]

    @property
    def notes(self) -> list[str]:
        """What was compared, and what the numbers say."""
        found = [_basis(self.pairing)]
        found += [
            f"{one.other.label} and {one.base.label}: {text}." for one in self.differences for text in reasons(one)
        ]
        if ended := [side.label for side in self.sides if side.untrimmed]:
            found.append(f"Drafts of {' and '.join(ended)} count also after the end of an answer.")
        if len(models := _models(self.sides)) > 1:
            found.append(f"Assumed: {' and '.join(models)} are the same model.")
        if unknown := [side.label for side in self.sides if side.speculation["algorithm"] == NO_SPECULATION]:
            found.append(f"Assumed: {' and '.join(unknown)} ran the same drafter; the records do not say which.")
        return found

    def markdown(self) -> str:
        headings = ["", self.sides[0].label]
        for one in self.differences:
            headings += [one.other.label, f"difference ({CONFIDENCE:.0%} interval)"]
        tables = [markdown_table([line.cells for line in self.lines], headings)]
        return "\n\n".join([_title(self.sides), *tables, "\n".join(f"* {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "prompts": None if self.pairing.indices is None else len(self.pairing.indices),
            "same_answers": self.pairing.same,
            "engines": {side.label: [str(path) for path in side.paths] for side in self.sides},
            "differences": {
                one.other.label: {
                    "accept_length": _as_dict(one.length),
                    "positions": [_as_dict(change) for change in one.positions],
                    "contexts": {str(start): _as_dict(change) for start, change in one.contexts.items()},
                    "reasons": reasons(one),
                }
                for one in self.differences
            },
            "notes": self.notes,
        }


def compare_engines(found: Iterable[tuple[Path, RunRecord]], setting: str = "runs") -> AcceptanceComparison:
    """Compare the engines of the runs that drafted. Refused: different drafters, and an engine without verifies of
    single requests."""
    sides = sides_of(found)
    drafters: dict[tuple[str, str], Path] = {}
    for side in sides:
        for path, record in zip(side.paths, side.records, strict=True):
            asked = record.config["speculation"]
            if asked["algorithm"] != NO_SPECULATION:
                drafters.setdefault((asked["algorithm"], Path(asked.get("draft") or "").name), path)
    if len(drafters) > 1:
        texts = [f"{path} ({' '.join(filter(None, drafter))})" for drafter, path in drafters.items()]
        raise refuse(setting, ", ".join(texts), "are of different drafters; name runs of one drafter in each engine")
    base, *others = counted_sides(setting, sides)
    pairing = paired(sides)
    return AcceptanceComparison(pairing, sides, [difference(base, other, pairing) for other in others])


def _title(sides: list[Side]) -> str:
    asked = next((side.speculation for side in sides if side.speculation["algorithm"] != NO_SPECULATION), None)
    draft = "" if asked is None else f"{asked['algorithm']} {asked.get('draft') or ''}".strip()
    return f"Acceptance of {draft or 'a drafter'} in {len(sides)} engines, model {' or '.join(_models(sides))}:"


def _models(sides: list[Side]) -> list[str]:
    return list(dict.fromkeys(Path(side.records[0].config["model"]).name for side in sides))


def _basis(pairing: Pairing) -> str:
    if pairing.indices is None:
        return "The prompts are other ones."
    count = len(pairing.indices)
    if pairing.same is None:
        return f"{count} prompts, paired; whether the answers are the same is not known."
    if pairing.of_same_answers:
        return f"{count} of {pairing.total} prompts, paired: those with the same answers."
    return f"{count} prompts, paired; {pairing.same} of the answers are the same."


def _as_dict(one: Change) -> dict[str, Any]:
    return {"before": one.before, "after": one.after, "low": one.interval.low, "high": one.interval.high}
