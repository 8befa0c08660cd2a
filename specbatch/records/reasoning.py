"""Reasoning and answer apart: tokens and acceptance of each, over the requests of runs of a model that reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbatch.core.completion import INCOMPLETE
from specbatch.records.markdown import markdown_table
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord

PARTS = (
    *("mean_reasoning_tokens", "mean_answer_tokens", "reasoning_accept_length", "answer_accept_length"),
    *("reasoning_accept_rate", "answer_accept_rate"),
)
_COUNTS = (
    *("output_tokens", "reasoning_tokens", "verify_steps", "emitted", "drafted", "accepted"),
    *(f"{part}_{name}" for part in ("reasoning", "answer") for name in ("verifies", "emitted", "drafted", "accepted")),
)
NOTE = "The first end of reasoning ends it. A verify belongs to the part in which it began; tokens are per answer."


def reasons(records: Iterable[RunRecord]) -> bool:
    """Whether an answer has reasoning."""
    return any(row.get("reasoning_tokens") for record in records for row in record.requests)


def parts_of(records: Sequence[RunRecord]) -> dict[str, float | None]:
    """The metrics `PARTS` over the requests of all records. Where no answer has reasoning, those of the answer are of
    all tokens."""
    rows = [row for record in records for row in record.requests if row.get("finish_reason") not in INCOMPLETE]
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: row.get(name) or 0 for name in _COUNTS})
    if not sums["reasoning_tokens"]:
        whole = {"verifies": "verify_steps", "emitted": "emitted", "drafted": "drafted", "accepted": "accepted"}
        sums.update({f"answer_{name}": sums[all_of] - sums[f"answer_{name}"] for name, all_of in whole.items()})

    def ratio(top: str, bottom: str) -> float | None:
        return sums[top] / sums[bottom] if sums[bottom] else None

    count = max(len(rows), 1)
    return {
        "mean_reasoning_tokens": sums["reasoning_tokens"] / count if sums["reasoning_tokens"] else None,
        "mean_answer_tokens": (sums["output_tokens"] - sums["reasoning_tokens"]) / count,
        **{f"{part}_accept_length": ratio(f"{part}_emitted", f"{part}_verifies") for part in ("reasoning", "answer")},
        **{f"{part}_accept_rate": ratio(f"{part}_accepted", f"{part}_drafted") for part in ("reasoning", "answer")},
    }


def parts_table(points: Mapping[tuple[Any, ...], Sequence[RunRecord]], names: tuple[str, ...] = ()) -> str:
    """Markdown: a row for each key, whose parts have the headings `names`. Empty where no answer reasons."""
    if not any(reasons(records) for records in points.values()):
        return ""
    body = [[*map(str, key), *part_cells(records)] for key, records in points.items()]
    headings = [*names, *(METRICS[key].heading for key in PARTS)]
    return f"Reasoning and answer:\n\n{markdown_table(body, headings)}\n\n{NOTE}"


def part_cells(records: Sequence[RunRecord]) -> list[str]:
    """The metrics `PARTS` as cells; without acceptance where nothing was drafted."""
    drafts = any(record.drafts or record.of_server for record in records)
    return [
        METRICS[key].text(value if drafts or key.startswith("mean_") else None)
        for key, value in parts_of(records).items()
    ]
