"""Acceptance of a sweep as tables of its own: no column depends on the speed of the machine.

A number is over the requests of all repeats. The interval of the accept length is a jackknife over prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbatch.core.sampling_params import sampling_text
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.intervals import Interval, Sample, over_prompts, sample
from specbatch.records.markdown import (
    acceptance_cells,
    acceptance_table,
    denominators_note,
    markdown_table,
    sum_lists,
)
from specbatch.records.metrics import ACCEPTANCE
from specbatch.records.reasoning import parts_table
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.heading import about, heading
from specbatch.sweeps.report.note import Note
from specbatch.sweeps.report.points import POINT, Points, points_of

COUNTS = ("output_tokens", "verify_steps", "emitted", "drafted", "accepted")
_LISTS = tuple(ACCEPTANCE)[1:]  # by draft position, number of tokens or context; the first is verify_steps
HEADINGS = (
    *("concurrency", "configuration", "requests", "output tokens"),
    *(f"accept length ({CONFIDENCE:.0%} interval)", "accept rate", *ACCEPTANCE),
)
SERVER_HEADINGS = ("verifies with drafts", "reached draft 1, 2, ... (%), untrimmed")
# Warnings that say whether acceptance can be believed; others are about times.
WARNINGS = ("SIMULATED", "CHECK OUTPUTS", "REPEATED", "TOKENS DIFFER", "INCOMPLETE", "FAILED", "UNFINISHED")
SERVERS = "Acceptance by the servers' own counts"
Row = dict[str, Any]


def acceptance(records: list[RunRecord]) -> str:
    """The table of acceptance; empty where nothing was drafted."""
    counters = {point: [record.counters for record in found] for point, found in points_of(records).items()}
    accepted = acceptance_table(counters, POINT, sampling_text(records[0].workload.get("sampling")))
    return f"{accepted}\n" if accepted else ""


def server_acceptance(points: Points) -> str:
    """The table of `server_acceptance_rows`; empty where there are none."""
    body = server_acceptance_rows(points)
    return f"{SERVERS}:\n\n{markdown_table(body, [*POINT, *SERVER_HEADINGS])}\n" if body else ""


def server_acceptance_rows(points: Points) -> list[list[str]]:
    """Acceptance by draft position as servers of other engines count it, of points where they do.

    Drafts after a stop or the limit count here, which the table of this engine's acceptance leaves out, and verifies
    without drafts do not.
    """
    body = []
    for point, repeats in points.items():
        counted = [found for record in repeats if (found := record.counters.get("server_acceptance"))]
        verifies = sum(found["verifies"] for found in counted)
        if verifies:
            accepted = sum_lists(found["accepted"] for found in counted)
            body.append([*point, str(verifies), " ".join(f"{100 * count / verifies:.0f}" for count in accepted)])
    return body


def acceptance_rows(records: list[RunRecord]) -> list[Row]:
    """One row per concurrency and configuration that drafted: its counts and rates."""
    rows = []
    for (concurrency, name), repeats in points_of(records).items():
        cells = acceptance_cells(record.counters for record in repeats)
        if cells is None:
            continue
        requests = [row for record in repeats for row in record.requests]
        counts = {key: sum(row.get(key) or 0 for row in requests) for key in COUNTS}
        spread = accept_interval(repeats)
        rows.append(
            {
                "concurrency": concurrency,
                "configuration": name,
                "simulated_acceptance": repeats[0].simulated_acceptance,
                "repeats": len(repeats),
                "requests": len(requests),
                **counts,
                "accept_length": counts["emitted"] / counts["verify_steps"] if counts["verify_steps"] else None,
                "accept_length_low": spread.low,
                "accept_length_high": spread.high,
                "accept_rate": counts["accepted"] / counts["drafted"] if counts["drafted"] else None,
                **dict(zip(_LISTS, cells[1:], strict=True)),
            }
        )
    return rows


def acceptance_markdown(records: list[RunRecord], rows: list[Row], notes: list[Note]) -> str:
    """Heading, table and the warnings among `notes` that bear on acceptance."""
    if not rows:
        return f"{heading(about(records))}\nNothing was drafted.\n"
    body = [
        [*(str(row[key]) for key in ("concurrency", "configuration", "requests", "output_tokens")), *_cells(row)]
        for row in rows
    ]
    lines = "".join(f"* {note}\n" for note in notes if note.warning in WARNINGS)
    sampling = sampling_text(records[0].workload.get("sampling"))
    parts = (
        heading(about(records)),
        f"Acceptance, {sampling}; intervals are over prompts (jackknife):\n",
        f"{markdown_table(body, HEADINGS)}\n",
        f"{found}\n" if (found := parts_table(points_of(records), POINT)) else "",
        f"{counted}\n" if (counted := denominators_note(record.counters for record in records)) else "",
        lines,
    )
    return "\n".join(filter(None, parts))


def _cells(row: Row) -> list[str]:
    length, low, high, rate = (row[key] for key in ("accept_length", "accept_length_low", "accept_length_high",
                                                    "accept_rate"))  # fmt: skip
    text = "-" if length is None else f"{length:.3f}" if low is None else f"{length:.3f} ({low:.2f}-{high:.2f})"
    return [
        text,
        "-" if rate is None else f"{rate:.3f}",
        str(row["verify_steps"]),
        *(row[key] for key in _LISTS),
    ]


def accept_interval(repeats: list[RunRecord]) -> Interval:
    """Of the accept length: that of its difference to zero."""
    found = sample(("emitted", "verify_steps"), repeats)
    if found is None:
        return Interval(None, None, "no numbers of single requests")
    return over_prompts(Sample(np.zeros_like(found.top), np.ones_like(found.bottom), found.indices), found)


@dataclass(frozen=True)
class AcceptChange:
    """An accept length with its interval, and its change from another one. Without `before`: the first of a table."""

    before: float | None
    after: float | None
    interval: Interval
    of_change: Interval | None

    @property
    def value(self) -> float | None:
        """The change."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def detectable(self) -> float | None:
        """The smallest change that would have been shown: `Estimate.detectable`."""
        estimate = None if self.of_change is None else self.of_change.estimate
        return None if estimate is None else estimate.detectable()

    @property
    def length_text(self) -> str:
        low, high = self.interval.low, self.interval.high
        ends = "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
        return "-" if self.after is None else f"{self.after:.3f}{ends}"

    @property
    def change_text(self) -> str:
        if self.value is None or self.of_change is None:
            return "-"
        low, high = self.of_change.low, self.of_change.high
        return f"{self.value:+.3f}" + ("" if low is None or high is None else f" ({low:+.2f} to {high:+.2f})")

    @property
    def detectable_text(self) -> str:
        return "-" if self.detectable is None else f"{self.detectable:.3f}"

    def as_dict(self) -> dict[str, float | None]:
        """Ready for CSV."""
        change = self.of_change or Interval(None, None, "")
        return {
            "accept_length": self.after,
            "accept_length_low": self.interval.low,
            "accept_length_high": self.interval.high,
            "change": self.value,
            "change_low": change.low,
            "change_high": change.high,
            "change_detectable": self.detectable,
        }


def accept_change(before: list[RunRecord], after: list[RunRecord]) -> AcceptChange:
    """The accept length of `after`, and its change from `before` (empty: none), over prompts: in pairs if both have the
    same."""
    old, new = (sample(("emitted", "verify_steps"), records) if records else None for records in (before, after))
    change = None if old is None or new is None else over_prompts(old, new)
    return AcceptChange(_ratio(old), _ratio(new), accept_interval(after), change)


def _ratio(found: Sample | None) -> float | None:
    return None if found is None or not found.bottom.sum() else float(found.top.sum() / found.bottom.sum())
