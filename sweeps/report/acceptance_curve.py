"""Acceptance by draft position of one or more runs, and the golden acceptance curve that follows from it.

The conditional probability of draft j is counted in all verifies that tried it, which means that they accepted all
drafts before it; k drafts have the mean accept length 1 + p_1 + ... + p_1 .. p_k. A file of these is read by
`--simulate-accept`: as JSON with the probabilities, as YAML with the accept lengths in the form of InferenceX.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config.acceptance_profile import AcceptanceProfile, from_counts, read_profile
from specbatch.core.sampling_params import sampling_text
from specbatch.errors import SpecbatchError, refuse
from specbatch.files.atomic_file import write_atomic
from specbatch.records.markdown import markdown_table, sum_lists
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import read_records
from specbatch.records.store import ReadRows

HEADERS = ("draft", "tried", "accepted", "accepted where tried (%)", "accept length with so many drafts")
_FORMS = (".json", ".yaml", ".yml")
_THINKING = {True: "thinking_on", False: "thinking_off", None: "default"}


@dataclass(frozen=True)
class AcceptanceCurve:
    """Counts by draft position, from the first on.

    name   model, draft and data set
    model  of the target
    mode   thinking_on or thinking_off, as asked of the chat template, else default
    runs   the folders of the records
    """

    name: str
    model: str
    mode: str
    tried: list[int]
    accepted: list[int]
    runs: list[str]

    @property
    def profile(self) -> AcceptanceProfile:
        return from_counts(self.name, self.tried, self.accepted)

    @property
    def accept_lengths(self) -> dict[int, float]:
        """Mean accept length by number of drafts."""
        return {count: self.profile.accept_length(count) for count in range(1, len(self.profile.conditional) + 1)}

    def markdown(self) -> str:
        lengths = self.accept_lengths
        rows = [
            [
                str(place),
                str(self.tried[place - 1]),
                str(self.accepted[place - 1]),
                f"{100 * p:.1f}",
                f"{lengths[place]:.3f}",
            ]
            for place, p in enumerate(self.profile.conditional, start=1)
        ]
        note = "Verifies without a draft, such as those of ngram without a match, are not counted."
        known, asked = len(rows), len(self.tried)
        if known < asked:
            places = f"Draft {asked} was" if asked == known + 1 else f"Drafts {known + 1} to {asked} were"
            reached = self.profile.conditional[-1] > 0
            use = f"simulate at most {known} drafts" if reached else "a simulation accepts none of them"
            note += f" {places} never tried: {use}."
        return f"{self.name}\n\n{markdown_table(rows, HEADERS)}\n\n{note}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "conditional": list(self.profile.conditional),
            "accept_length": {str(count): length for count, length in self.accept_lengths.items()},
            "tried": self.tried,
            "accepted": self.accepted,
            "runs": self.runs,
        }

    def save(self, path: Path) -> None:
        """Write a JSON or YAML file; the suffix decides. Refused: an existing file that is no curve."""
        check_suffix(path)
        if path.exists():
            try:
                read_profile(str(path))
            except SpecbatchError:
                raise refuse("output", str(path), "already exists and is no curve; name another file") from None
        if path.suffix == ".json":
            write_atomic(path, json.dumps(self.as_dict(), indent=2) + "\n")
            return
        lines = [f"    {count}: {length:.6f}" for count, length in self.accept_lengths.items()]
        head = [
            f"# {self.name}",
            *(f"# {run}" for run in self.runs),
            "# mean accept length by number of drafted tokens",
        ]
        write_atomic(path, "\n".join([*head, f"{json.dumps(self.model)}:", f"  {self.mode}:", *lines, ""]))


def check_suffix(path: Path) -> None:
    """Refuse a file that is neither JSON nor YAML."""
    if path.suffix not in _FORMS:
        raise refuse("output", str(path), "name a .json or .yaml file")


def curve_of(paths: Iterable[Path]) -> AcceptanceCurve:
    """The curve of all runs at `paths` that drafted. Refused: none, and runs of different models, drafts, data sets or
    simulations."""
    return curve_of_records(read_all(paths, lambda output: []))


def read_all(paths: Iterable[Path], read_rows: ReadRows) -> list[tuple[Path, RunRecord]]:
    """The records of all runs, each once."""
    found = {
        place.resolve(): (place, record) for path in paths for place, record in read_records("runs", path, read_rows)
    }
    return list(found.values())


def curve_of_records(found: list[tuple[Path, RunRecord]]) -> AcceptanceCurve:
    """As `curve_of`."""
    drafting = [
        (place, record) for place, record in found if any(record.counters.get("acceptance", {}).get("drafted", ()))
    ]
    if not drafting:
        listed = ", ".join(str(place) for place, _ in found)
        raise refuse("runs", listed, "no run there used speculation; name runs that did")
    names = {_name(record): place for place, record in drafting}
    if len(names) > 1:
        (name, place), (other, elsewhere), *_ = names.items()
        raise refuse("runs", f"{place}, {elsewhere}", f"differ: {name}; {other}. Name runs of one draft")
    counts = [record.counters["acceptance"] for _, record in drafting]
    (name,) = names
    first = drafting[0][1]
    return AcceptanceCurve(
        name,
        Path(first.config["model"]).name,
        _THINKING[first.workload.get("thinking")],
        sum_lists(count["tried"] for count in counts),
        sum_lists(count["accepted"] for count in counts),
        [str(place) for place, _ in drafting],
    )


def _name(record: RunRecord) -> str:
    """What the acceptance is of."""
    asked, work = record.speculation, record.workload
    shape = f" (tree, top {asked.shape.topk})" if asked.shape.topk > 1 else ""
    data = work.get("dataset") or work.get("task") or work.get("command")
    category, simulated = work.get("category"), record.simulated_acceptance
    parts = (
        Path(record.config["model"]).name,
        f"{asked.algorithm}{f' {asked.draft}' if asked.draft else ''}{shape}",
        f"{data}{f' ({category})' if category else ''}",
        f"thinking {'on' if work['thinking'] else 'off'}" if work.get("thinking") is not None else "",
        sampling_text(work["sampling"]) if work.get("sampling") else "",
        f"{asked.verification} verification" if asked.verification != "token" else "",
        f"simulated: {simulated}" if simulated else "",
    )
    return ", ".join(filter(None, parts))
